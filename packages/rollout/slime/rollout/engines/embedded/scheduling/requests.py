"""Work for the thread that owns the model: requests, calls between two steps, and work that is done in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.engines.embedded.model.response import Response


def _future() -> Future[Any]:
    # Marked as running: a client that goes away cannot cancel it while the model's thread is about to resolve it.
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class SubmittedRequest:
    """The sequences of one HTTP request; `done` is resolved when all of them have finished.

    waiting: those that no batch has taken yet.
    """

    responses: list[Response]
    done: Future[Any] = field(default_factory=_future)
    waiting: deque[Response] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = deque(self.responses)

    @property
    def is_finished(self) -> bool:
        return all(r.finish_reason is not None for r in self.responses)

    @property
    def error(self) -> Exception | None:
        return next((r.error for r in self.responses if r.error is not None), None)

    @property
    def is_started(self) -> bool:
        return len(self.waiting) < len(self.responses)

    def drop_finished(self) -> None:
        """Takes sequences that were ended before they ran out of `waiting`."""
        self.waiting = deque(r for r in self.waiting if r.finish_reason is None)


@dataclass(eq=False)
class Call:
    """Work for the model's thread between two steps; `done` gets what it returns or raises."""

    function: Callable[[], Any]
    done: Future[Any] = field(default_factory=_future)

    def run(self) -> None:
        try:
            result = self.function()
        except Exception as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


@dataclass(eq=False)
class Pieces:
    """Work that is done a piece at a time, between steps: `begin` makes an iterator whose last item is the answer.

    It starts over if the weights change in the middle.
    """

    begin: Callable[[], Iterator[Any]]
    done: Future[Any] = field(default_factory=_future)
    is_wanted: bool = True
    """False where nobody waits any more: the rest is not done."""
    _under_way: Iterator[Any] | None = None
    _writes: int = 0
    _latest: Any = None

    def advance(self, writes: int) -> bool:
        """Does one piece with the weights after `writes`. Returns whether that was the last."""
        if not self.is_wanted:
            return True
        try:
            if self._under_way is None or writes != self._writes:
                self._under_way, self._writes = self.begin(), writes
            self._latest = next(self._under_way)
        except StopIteration:
            self.done.set_result(self._latest)
        except Exception as error:
            self.done.set_exception(error)
        else:
            return False
        return True
