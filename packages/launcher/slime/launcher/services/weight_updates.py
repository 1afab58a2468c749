"""Sends the trainer's weights to all engines after a step, and to engines that were started again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from slime.launcher.services.returning import ReturningEngines
from slime.launcher.services.supervisor import Supervisor
from slime.types.clients import RolloutClient, TrainerClient
from slime.types.errors import DeadlineExceeded, EngineError, SlimeError, WrongState

log = logging.getLogger(__name__)

T = TypeVar("T")


class TrainerRanks:
    """The ranks of the trainer. Their calls are collective: every rank must get them in the same order.

    turn: lock that is held during a call.
    """

    def __init__(self, clients: list[TrainerClient], supervisor: Supervisor) -> None:
        self.clients = clients
        self.turn = threading.RLock()
        self._supervisor = supervisor

    def each(self, function: Callable[[TrainerClient], T]) -> list[T]:
        """Runs `function` on every rank at once. Raises the error of a rank, or of a service that failed meanwhile."""
        with self.turn:
            return self._supervisor.call_all([partial(function, client) for client in self.clients])


class WeightUpdates:
    """Sends the trainer's weights to the engines. version: the version under which the engines have, or will get, the
    trainer's current weights.

    restarts_engines: whether engines may be started again or join while the run goes on.
    """

    def __init__(
        self,
        ranks: TrainerRanks,
        rollout: RolloutClient,
        supervisor: Supervisor,
        *,
        version: int,
        restarts_engines: bool,
        timeout_seconds: float,
    ) -> None:
        self.version = version
        self._sent = False
        # The number of losses of engines: in all, and before the last weights were sent.
        self._losses = self._restored = 0
        # The restarts that were known when an update failed last.
        self._known_restarts = (0, 0)
        self._ranks = ranks
        self._rollout = rollout
        self._supervisor = supervisor
        self._restarts_engines = restarts_engines
        self._timeout = timeout_seconds
        self._returning: ReturningEngines | None = None

    def watch(self) -> None:
        """Begins to send weights to engines that were started again, beside the training loop, until `stop`."""
        if self._ranks.clients and self._restarts_engines:
            self._returning = ReturningEngines(self._rollout.status, self.send_to_returning)
            self._supervisor.begin(self._returning.watch)

    def stop(self) -> None:
        if self._returning is not None:
            self._returning.stop()

    def send(self, version: int) -> dict[str, float]:
        """Sends the weights as `version`, again if an engine dies meanwhile and is replaced."""
        losses = self._losses
        metrics = self._send_until_done(version)
        # The engines that got these weights may be lost by now.
        self._sent, self._restored = True, losses
        return metrics

    def engines_lost(self) -> None:
        """Records that the rollout service is started again, with engines that have the weights of their start."""
        self._losses += 1

    def restore(self) -> None:
        """Sends the trainer's weights if the engines were started again since the last update."""
        if self._sent and self._restored != self._losses:
            self.send(self.version)

    def _send_until_done(self, version: int) -> dict[str, float]:
        if not self._restarts_engines:
            metrics = self._ranks.each(lambda trainer: trainer.update_weights(version, timeout=self._timeout))
            return metrics[0] if metrics else {}
        while True:
            results = self._ranks.each(partial(self._send, version=version))
            errors = [result for result in results if isinstance(result, SlimeError)]
            if not errors:
                return next((result for result in results if isinstance(result, dict)), {})
            # The number of restarts is limited, so this loop ends. Asking for it before each update would cost every
            # iteration a call, and save an attempt where an update fails for another reason after a restart.
            known, self._known_restarts = self._known_restarts, self._restarts()
            if self._known_restarts == known:
                raise errors[0]
            log.warning("weight update %d is repeated, because an engine was lost: %s", version, errors[0])

    def send_to_returning(self) -> None:
        """Sends the weights to engines that were started again."""
        with self._ranks.turn:
            results = self._ranks.each(partial(self._send, version=self.version, joining=True))
        for result in results:
            if isinstance(result, SlimeError):
                raise result

    def _restarts(self) -> tuple[int, int]:
        """Returns the number of repairs of services, and of restarts of engines that get these weights."""
        engines = self._supervisor.call(self._rollout.status).trained_engine_restarts
        repeats = self._supervisor.repeats
        return 0 if repeats is None else repeats.wait_until_whole(), engines

    def _send(self, trainer: TrainerClient, *, version: int, **options: bool) -> dict[str, float] | SlimeError:
        # Errors are collected, so that no rank is called again before all have answered.
        try:
            return trainer.update_weights(version, self._timeout, **options)
        except (EngineError, DeadlineExceeded, WrongState) as error:
            return error
