"""Results of functions that another thread calls while the trainer works on a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

# The call to the trainer goes out first: threads that compute make others wait for the interpreter's lock.
HEAD_START_SECONDS = 0.05
T = TypeVar("T")


class ComputingCalls(Protocol):
    """The methods of `Supervisor` that are used here."""

    def begin(self, function: Callable[[], Any]) -> Future[Any]: ...
    def join(self, future: Future[Any]) -> Any: ...


class BesideTraining(Generic[T]):
    """One result for each step. calls: runs functions in the background."""

    def __init__(self, calls: ComputingCalls) -> None:
        self._calls = calls
        # With an event that is set once the result is waited for.
        self._futures: dict[int, tuple[Future[T], threading.Event]] = {}

    def begin(self, step: int, function: Callable[[], T]) -> None:
        """Has `function` called soon, in place of the one that was begun for `step` before."""
        wanted = threading.Event()

        def call() -> T:
            wanted.wait(HEAD_START_SECONDS)
            return function()

        self._futures[step] = self._calls.begin(call), wanted

    def take(self, step: int, default: T) -> T:
        """Waits for the result for `step` and returns it, once; `default` if there is none. Raises the function's
        error."""
        if step not in self._futures:
            return default
        future, wanted = self._futures.pop(step)
        wanted.set()
        result: T = self._calls.join(future)
        return result
