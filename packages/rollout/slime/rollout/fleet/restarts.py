"""Starts engines again that died or hang, each a bounded number of times within a time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slime.rollout.engines.process import EngineProcess, stop_all
from slime.types.errors import EngineError, counted

# Engines that are started again at the same time; more wait.
MOST_AT_ONCE = 64


@dataclass(frozen=True)
class RestartLimits:
    """Limits of restarts. most: restarts of one engine within `window_seconds`, or for one loss; each may take
    `start_seconds`."""

    most: int = 5
    window_seconds: float = 600.0
    start_seconds: float = 300.0


class Restarts:
    """Starts lost engines again. Thread-safe. count: engines that were lost, each as often as it was.

    threads: for `start`, which takes minutes: in the event loop's own, many restarts would hold up all other work.
    """

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self.count = 0
        self._began: defaultdict[str, deque[float]] = defaultdict(deque)
        self.threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="restart")
        self._starting: set[EngineProcess] = set()
        # Started engines that serve, until their member has them.
        self._ready: set[EngineProcess] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def check(self, name: str, reason: str, since: float) -> None:
        """Counts one more restart of the engine `name`, which was lost at `since`. Raises EngineError where that is too
        many."""
        now, began, limits = time.monotonic(), self._began[name], self.limits
        # Tries since then stay: each may take longer than the window.
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
        """Ends what is left of `engine` and returns its successor once that serves. `taken` must follow, or `stop`
        ends it.

        Raises what the engine refuses to start with, EngineError, DeadlineExceeded; then nothing is left running.
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
        if self._stopped:
            raise EngineError(f"engine {engine.name} is not started again: the fleet has ended", field=engine.name)

    def taken(self, engine: EngineProcess) -> None:
        """Notes that the fleet has a started engine, and will end it."""
        with self._lock:
            self._ready.discard(engine)

    def stop(self) -> None:
        """Ends the engines that are being started or that nobody has taken, and starts no more."""
        with self._lock:
            self._stopped = True
            starting, ready = list(self._starting), list(self._ready)
            self._ready.clear()
        for engine in starting:
            # The waiting thread cleans up.
            engine.kill()
        stop_all(ready, 0)
