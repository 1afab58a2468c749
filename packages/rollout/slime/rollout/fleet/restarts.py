"""Restarts engines that died or hang, each at most so many times within a window of time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slime.rollout.engines.process import EngineProcess, stop_all
from slime.types.errors import EngineError, counted

# The most engines that are restarted at the same time; others wait.
MOST_AT_ONCE = 64


@dataclass(frozen=True)
class RestartLimits:
    """Limits of restarts.

    most: restarts of one engine within `window_seconds`, and attempts after one loss. start_seconds: the time within
    which a restarted engine must be ready.
    """

    most: int = 5
    window_seconds: float = 600.0
    start_seconds: float = 300.0


class Restarts:
    """Restarts lost engines. Thread-safe.

    count: losses of engines so far. stopped: whether the fleet ends, and no engine is started again. threads: run
    `start`, which takes minutes; in the event loop's default executor many restarts would hold up all other work.
    """

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self.count = 0
        self._began: defaultdict[str, deque[float]] = defaultdict(deque)
        self.threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="restart")
        self._starting: set[EngineProcess] = set()
        # Restarted engines that are ready, but not yet taken over by their member.
        self._ready: set[EngineProcess] = set()
        self.stopped = False
        self._lock = threading.Lock()

    def check(self, name: str, reason: str, since: float) -> None:
        """Counts one more restart of the engine `name`, lost at `since` (of time.monotonic). Raises EngineError where
        that exceeds the limits."""
        now, began, limits = time.monotonic(), self._began[name], self.limits
        # Attempts after the loss are always counted, because each may take longer than the window.
        while began and since - began[0] > limits.window_seconds:
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
        """Ends what is left of `engine`, and returns its successor once that is ready. Until the caller reports it with
        `taken`, `stop` ends the successor.

        Raises the error with which the engine refuses to start, EngineError or DeadlineExceeded; then nothing is left
        running.
        """
        engine.stop(0)
        with self._lock:
            self._refuse_if_stopped(engine)
            started = engine.start_again()
            self._starting.add(started)
        try:
            started.wait_ready(self.limits.start_seconds)
            with self._lock:
                self._refuse_if_stopped(engine)
                self._ready.add(started)
        except BaseException:
            started.stop(0)
            raise
        finally:
            with self._lock:
                self._starting.discard(started)
        return started

    def _refuse_if_stopped(self, engine: EngineProcess) -> None:
        if self.stopped:
            raise EngineError(f"engine {engine.name} is not started again: the fleet has ended", field=engine.name)

    def taken(self, engine: EngineProcess) -> None:
        """Notes that the fleet has taken over a restarted engine, and will end it."""
        with self._lock:
            self._ready.discard(engine)

    def stop(self) -> None:
        """Ends the engines that are being started or that nobody has taken, and starts no more."""
        with self._lock:
            self.stopped = True
            starting, ready = list(self._starting), list(self._ready)
            self._ready.clear()
        for engine in starting:
            # The thread that waits in `start` cleans up.
            engine.kill()
        stop_all(ready, 0)
