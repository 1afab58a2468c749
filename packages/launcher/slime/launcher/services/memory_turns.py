"""Lets engines and trainer take turns with the memory of the GPUs that they share."""

from __future__ import annotations

import time
from collections.abc import Callable

from slime.launcher.services.start import Progress
from slime.launcher.services.supervisor import Supervisor
from slime.types.clients import RolloutClient


class MemoryTurns:
    """Moves the engines out of GPU memory and back. offloaded: the engines have released their memory to the trainer.
    always: they do so even if both have room.

    trainer_stays: the trainer has found room for all its work beside the engines. Metrics are in seconds.
    """

    def __init__(
        self,
        rollout: RolloutClient,
        supervisor: Supervisor,
        progress: Progress,
        *,
        always: bool,
        timeout_seconds: float,
    ) -> None:
        self.offloaded = False
        self.trainer_stays = False
        self._rollout = rollout
        self._supervisor = supervisor
        self._progress = progress
        self._always = always
        self._timeout = timeout_seconds

    def offload(self) -> dict[str, float]:
        if self.trainer_stays and not self._always:
            return {}
        self._progress("offloading the engines", 0, 0)
        self.offloaded = True
        return self._timed("perf/offload_time", lambda: self._rollout.offload(timeout=self._timeout))

    def onload(self) -> dict[str, float]:
        if not self.offloaded:
            return {}
        self._progress("onloading the engines", 0, 0)
        self.offloaded = False
        return self._timed("perf/onload_time", lambda: self._rollout.onload(["weights"], timeout=self._timeout))

    def _timed(self, key: str, function: Callable[[], None]) -> dict[str, float]:
        started = time.perf_counter()
        self._supervisor.call(function)
        return {key: time.perf_counter() - started}
