"""Generates rollouts ahead of the trainer: in order, one at a time, up to a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self, TypeVar

T = TypeVar("T")
Metrics = dict[str, float]


class Generation(Protocol):
    """The methods of `Services` that Prefetch calls."""

    def generate(self, rollout_id: int) -> Metrics: ...
    def seal(self, step: int, generated: Metrics) -> None: ...
    def begin(self, function: Callable[[], T]) -> Future[T]: ...
    def join(self, future: Future[T]) -> T: ...


class Prefetch:
    """Keeps up to `size` rollouts, generated or in progress, ahead of the trainer. steps: numbers of all rollouts.

    Each rollout is sealed before the next begins, so that it contains no later groups. Leaving the context manager
    prevents further rollouts from beginning.
    """

    def __init__(self, run: Generation, steps: range, size: int) -> None:
        self._run = run
        self._size = size
        self._next, self._stop = steps.start, steps.stop
        # Rollouts that have begun and have not been taken yet, by number.
        self._waiting: dict[int, Future[None]] = {}
        self._in_flight: Future[None] | None = None
        self._paused = False
        # Start and end of each generation; the end is None while it runs.
        self._times: dict[int, tuple[float, float | None]] = {}
        # Reentrant: a future that is already done calls back at once, in the same thread.
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._paused = True

    def take(self, step: int) -> None:
        """Waits for the rollout `step`, the next in order. Resumes paused generation."""
        with self._lock:
            self._paused = False
            self._advance()
            future = self._waiting[step]
        self._run.join(future)
        with self._lock:
            del self._waiting[step]
            self._advance()

    def pause(self) -> float:
        """Waits until nothing is being generated, and begins nothing until the next `take`. Returns the seconds
        waited."""
        started = time.perf_counter()
        with self._lock:
            self._paused = True
            future = self._in_flight
        if future is not None:
            self._run.join(future)
        return time.perf_counter() - started

    def seconds_generating(self, start: float, end: float) -> float:
        """Returns the seconds of generation between `start` and `end`, on the clock of time.perf_counter.

        Successive calls must not go back in time.
        """
        with self._lock:
            spans = [(begun, ended) for begun, ended in self._times.values()]
            self._times = {step: span for step, span in self._times.items() if span[1] is None or span[1] > end}
        return sum(max(0.0, min(end, ended or end) - max(start, begun)) for begun, ended in spans)

    def _advance(self) -> None:
        """Begins the next rollout, if there is one and room for it."""
        if self._paused or self._in_flight is not None or self._next == self._stop or len(self._waiting) >= self._size:
            return
        step = self._next
        self._next += 1
        future = self._run.begin(lambda: self._generate(step))
        self._waiting[step] = self._in_flight = future
        future.add_done_callback(self._ended)

    def _generate(self, step: int) -> None:
        begun = time.perf_counter()
        with self._lock:
            self._times[step] = begun, None
        self._run.seal(step, self._run.generate(step))
        with self._lock:
            self._times[step] = begun, time.perf_counter()

    def _ended(self, future: Future[None]) -> None:
        with self._lock:
            self._in_flight = None
            if not future.cancelled() and future.exception() is None:
                self._advance()
