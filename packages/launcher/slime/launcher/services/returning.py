"""Sends weights to engines that were started again or have joined, beside the training loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from slime.types.clients.rollout import RolloutStatus
from slime.types.errors import DeadlineExceeded, EngineError, SlimeError, WrongState

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
# Transfers that may fail in a row. An engine that dies during one is restarted by its service, which has its own limit.
MOST_FAILURES = 5


class ReturningEngines:
    """Asks the rollout service for engines that wait for weights, until `stop`.

    status: returns the status of the rollout service. send: sends the trainer's weights to the engines that wait.
    """

    def __init__(self, status: Callable[[], RolloutStatus], send: Callable[[], object]) -> None:
        self._status = status
        self._send = send
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def watch(self) -> None:
        """Returns after `stop`. Raises the error of a transfer that failed again and again."""
        failures = reported = 0
        while not self._stopping.wait(POLL_SECONDS):
            try:
                status = self._status()
            except SlimeError as error:
                # The process of the rollout service is watched elsewhere.
                log.debug("no status of the engines: %s", error)
                continue
            if status.engine_restarts > reported:
                reported = status.engine_restarts
                log.warning(
                    "an engine died or hangs, and is started again or leaves the run; logs/rollout.log says why (%d so "
                    "far)",
                    reported,
                )
            if not any(engine.awaits_weights for engine in status.engines):
                continue
            try:
                self._send()
                failures = 0
            except (EngineError, DeadlineExceeded, WrongState) as error:
                failures += 1
                if failures == MOST_FAILURES:
                    raise
                log.warning("engines that wait for weights got none yet: %s", error)
