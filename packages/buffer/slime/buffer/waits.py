"""Lets a limited number of calls wait for a change, and wakes them one by one, in order.

A write wakes only calls that wait for its topic, and no more of them than it can serve: with 500 workers waiting for a
group, one more prompt wakes one of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeVar

from slime.types.errors import Busy, InvalidField, Unavailable, counted

T = TypeVar("T")

# Topics; a plan's is ("plan", step).
READY, COMPLETED = "ready", "completed"
# A client that waits longer calls again, so that no call holds a thread for ever.
LONGEST_WAIT = 600.0


class Caller:
    """A call that may wait. active: returns whether its client is still there; `end` is called when that changes.

    changes_needed: the least number of changes after which another attempt can succeed, which an attempt may set.
    """

    def __init__(self, active: Callable[[], bool] = lambda: True) -> None:
        self.active = active
        self.changes_needed = 1
        self.wake_event = threading.Event()

    def end(self) -> None:
        self.wake_event.set()


class Waits:
    """Calls that wait for a change. Thread-safe. capacity: how many calls may wait at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, deque[Caller]] = {}
        self._count = 0
        self._closing = False

    def wait(
        self,
        topic: Hashable,
        attempt: Callable[[], T | None],
        seconds: float,
        caller: Caller,
        seconds_to_change: Callable[[], float | None] = lambda: None,
    ) -> T | None:
        """Returns a result of `attempt` other than None, trying again when `topic` is woken, for up to `seconds`.

        seconds_to_change: returns the seconds until something changes that wakes nobody; None for never.
        Raises Busy if `capacity` calls wait already, and Unavailable once `close` was called.
        """
        if not 0 <= seconds <= LONGEST_WAIT:
            raise InvalidField("wait_seconds", seconds, f"a number of seconds from 0 to {LONGEST_WAIT:g}")
        if self._closing:
            raise Unavailable("the buffer is stopping")
        # An attempt for a client that is gone would lease groups to nobody.
        result = attempt() if caller.active() else None
        if result is not None or not seconds:
            return result
        deadline = time.monotonic() + seconds
        self._enter(topic, caller)
        try:
            while True:
                caller.wake_event.clear()
                if self._closing:
                    raise Unavailable("the buffer is stopping")
                result = attempt() if caller.active() else None
                left = deadline - time.monotonic()
                if result is not None or left <= 0 or not caller.active():
                    return result
                # One waiting call is enough to notice changes that wake nobody.
                change = seconds_to_change() if self._is_first(topic, caller) else None
                caller.wake_event.wait(left if change is None else min(left, change + 0.001))
        finally:
            self._leave(topic, caller)

    def wake(self, topic: Hashable, count: int = 1) -> None:
        """Notes `count` changes, and lets as many of the first calls that wait for `topic`, were not woken yet and need
        no more changes try again."""
        with self._lock:
            left = count
            for caller in self._waiting.get(topic, ()):
                if left <= 0:
                    return
                if not caller.wake_event.is_set():
                    # Waking a thread costs more than most of what a call does.
                    caller.changes_needed -= count
                    if caller.changes_needed <= 0:
                        caller.wake_event.set()
                        left -= 1

    def wake_all(self) -> None:
        with self._lock:
            for callers in self._waiting.values():
                for caller in callers:
                    caller.wake_event.set()

    def close(self) -> None:
        """Ends all waits with Unavailable, now and from now on."""
        self._closing = True
        self.wake_all()

    def _enter(self, topic: Hashable, caller: Caller) -> None:
        with self._lock:
            if self._count >= self.capacity:
                raise Busy(
                    f"{counted(self._count, 'call is', 'calls are')} waiting already: call again later",
                    field="wait_seconds",
                    value=self._count,
                    expected=f"fewer than {self.capacity} calls that wait",
                )
            self._count += 1
            self._waiting.setdefault(topic, deque()).append(caller)

    def _leave(self, topic: Hashable, caller: Caller) -> None:
        with self._lock:
            self._count -= 1
            callers = self._waiting[topic]
            callers.remove(caller)
            if not callers:
                del self._waiting[topic]
            else:
                # The call may have been woken for something that it did not take, or was the one to watch the clock.
                callers[0].wake_event.set()

    def _is_first(self, topic: Hashable, caller: Caller) -> bool:
        with self._lock:
            return self._waiting[topic][0] is caller
