"""Runs the rollout function of one Generate or Evaluate call in a thread, and streams its progress to the caller."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import grpc

from slime.rollout.calls.call import CALL, RolloutCall
from slime.types.errors import Busy, SlimeError, counted

if TYPE_CHECKING:
    from slime.rollout.fleet.fleet import Fleet

T = TypeVar("T")

# The most Generate and Evaluate calls at once: each occupies a thread of the server, which other calls need too.
MOST_CALLS = 16


@dataclass
class Progress:
    done: int
    total: int


@dataclass
class Result(Generic[T]):
    value: T
    call: RolloutCall
    seconds: float


class RolloutJob(Generic[T]):
    """Runs a rollout function in a thread.

    `events()` yields Progress, then one Result. It raises the error of the function, or EngineError as soon as the
    fleet fails, even while the function still runs.
    """

    def __init__(
        self, fleet: Fleet, rollout_id: int, total: int, function: Callable[[], T], *, evaluation: bool = False
    ) -> None:
        self._fleet = fleet
        self._function = function
        self._events: queue.SimpleQueue[Progress | Result[T] | BaseException | None] = queue.SimpleQueue()
        self.call = RolloutCall(
            rollout_id, total, evaluation=evaluation, on_progress=lambda d, t: self._events.put(Progress(d, t))
        )
        self._over = False
        self._thread = threading.Thread(target=self._work, name=f"rollout-{rollout_id}", daemon=True)

    def cancel(self) -> None:
        """Ends `events()`; may be called from any thread."""
        self.call.cancel()
        self._events.put(None)

    def events(self) -> Iterator[Progress | Result[T]]:
        if self._fleet.error is not None:
            raise self._fleet.error
        stop_listening = self._fleet.on_failure(self._events.put)
        self._thread.start()
        try:
            while True:
                event = self._events.get()
                if event is None:
                    return
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, Result):
                    return
        finally:
            stop_listening()
            self.call.cancel()
            # The default rollout ends when cancelled; a plug-in that ignores cancellation is left running.
            self._thread.join(timeout=5)
            self._unread()

    def _unread(self) -> None:
        """Drops events that nobody reads any more. An error among them holds this job through its traceback."""
        self._over = True
        while not self._events.empty():
            self._events.get()

    def _work(self) -> None:
        CALL.set(self.call)
        started = time.monotonic()
        try:
            value = self._function()
        except SlimeError as error:
            self._events.put(error)
        except BaseException as error:
            self._events.put(self._fleet.error or error)
        else:
            self._events.put(Result(value, self.call, time.monotonic() - started))
        if self._over:
            self._unread()


class RunningJobs:
    """Runs the jobs of calls, a limited number at a time. Thread-safe."""

    def __init__(self, most: int = MOST_CALLS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self.count = 0

    def run(self, job: RolloutJob[T], context: grpc.ServicerContext) -> Iterator[Progress | Result[T]]:
        """Yields the events of a job, which ends with its call. Raises Busy where the most jobs run already."""
        with self._lock:
            if self.count >= self._most:
                raise Busy(
                    f"{counted(self.count, 'rollout is', 'rollouts are')} running already: call again later",
                    field="rollout_id", value=job.call.rollout_id, expected=f"fewer than {self._most} running calls",
                )  # fmt: skip
            self.count += 1
        try:
            if not context.add_callback(job.cancel):  # the call has ended already
                job.cancel()
            yield from job.events()
        finally:
            with self._lock:
                self.count -= 1
