"""Starts engines again that died or hang, each a bounded number of times within a time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass

from slime.rollout.engines.process import EngineProcess
from slime.types.errors import EngineError, counted


@dataclass(frozen=True)
class RestartLimits:
    """most: restarts of one engine within `window_seconds`; each may take `start_seconds`."""

    most: int = 5
    window_seconds: float = 600.0
    start_seconds: float = 300.0


class Restarts:
    """Thread-safe. count: engines that were lost, each as often as it was."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self.count = 0
        self._began: defaultdict[str, deque[float]] = defaultdict(deque)
        self._starting: set[EngineProcess] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def check(self, name: str, reason: str) -> None:
        """Counts one more restart of the engine `name`. Raises EngineError where that is too many."""
        now, began, limits = time.monotonic(), self._began[name], self.limits
        while began and now - began[0] > limits.window_seconds:
            began.popleft()
        if len(began) >= limits.most:
            raise EngineError(
                f"engine {name} was started again {counted(len(began), 'time')} within {limits.window_seconds:g} s, "
                "the most that --rollout-engine-max-restarts and --rollout-engine-restart-window allow. "
                f"The last time, {reason}",
                field=name, value=len(began), expected=f"at most {limits.most} restarts",
            )  # fmt: skip
        began.append(now)

    def start(self, engine: EngineProcess) -> EngineProcess:
        """Ends what is left of `engine` and returns its successor once that serves.

        Raises what the engine refuses to start with, EngineError, DeadlineExceeded; then nothing is left running.
        """
        engine.stop(0)
        with self._lock:
            if self._stopped:
                raise EngineError(f"engine {engine.name} is not started again: the fleet has ended", field=engine.name)
            started = engine.start_again()
            self._starting.add(started)
        try:
            started.wait_ready(self.limits.start_seconds)
        except BaseException:
            started.stop(0)
            raise
        finally:
            with self._lock:
                self._starting.discard(started)
        return started

    def stop(self) -> None:
        """Ends the engines that are being started, and starts no more."""
        with self._lock:
            self._stopped = True
            starting = list(self._starting)
        for engine in starting:
            # The thread that waits for it cleans up.
            engine.kill()
