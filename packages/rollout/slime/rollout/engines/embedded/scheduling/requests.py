"""Work for the thread that owns the model: requests, calls between two steps, and work that is done in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.engines.embedded.model.response import Response


def _future() -> Future[Any]:
    # Marked as running, so that a disconnecting client cannot cancel it while the model's thread resolves it.
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False)
class SubmittedRequest:
    """The sequences of one HTTP request; `done` is resolved when all of them have finished.

    waiting: the sequences that are in no batch yet.
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
        """Removes sequences from `waiting` that were ended before they ran."""
        self.waiting = deque(r for r in self.waiting if r.finish_reason is None)


@dataclass(eq=False)
class Call:
    """Work for the model's thread between two steps; `done` gets its result or its error."""

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
    """Work that is done one piece at a time between steps. `begin` returns an iterator whose last item is the answer.

    The work starts over if the weights change before it is complete.
    """

    begin: Callable[[], Iterator[Any]]
    done: Future[Any] = field(default_factory=_future)
    is_wanted: bool = True
    """False once nobody waits for the answer any more: the remaining pieces are dropped."""
    _under_way: Iterator[Any] | None = None
    _writes: int = 0
    _latest: Any = None

    def advance(self, writes: int) -> bool:
        """Does one piece. writes: the number of changes to the weights so far. Returns whether the work is over."""
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
