"""Calls of several threads that are made as one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slime.types.errors import DeadlineExceeded, SlimeError, Unavailable

T = TypeVar("T")

# Calls under way at the same time: while the buffer works on one, the next is encoded.
MOST_CALLS = 2
# Errors of the connection, not of a value: another call would wait as long again.
OUTAGES = (Unavailable, DeadlineExceeded)


@dataclass(eq=False)
class _Item(Generic[T]):
    """A thread's value. taken: a call with it has begun; ended: that call is over, and `stored` says whether it
    succeeded; outage: the error of OUTAGES that ended it, if one did."""

    value: T
    taken: bool = False
    ended: bool = False
    stored: bool = False
    outage: SlimeError | None = None


class JointCalls(Generic[T]):
    """Calls `one` or `several` with what threads hand over: while `MOST_CALLS` calls are under way, the values of other
    threads are collected for the next. Thread-safe.

    several: stores all of its values, or raises. Then each thread calls `one` with its own, which may be stored
    already, so that it gets the error of that value alone; but an error of `OUTAGES` is that of all threads.
    """

    def __init__(self, one: Callable[[T], Any], several: Callable[[list[T]], Any]) -> None:
        self._one, self._several = one, several
        self._changed = threading.Condition()
        self._collected: list[_Item[T]] = []
        self._under_way = 0

    def __call__(self, value: T) -> None:
        """Returns once `value` is stored. Raises what `one` raises, or an error of `OUTAGES`."""
        item = _Item(value)
        with self._changed:
            self._collected.append(item)
            self._changed.wait_for(lambda: item.ended or (not item.taken and self._under_way < MOST_CALLS))
            together, self._collected = ([], self._collected) if item.taken else (self._collected, [])
            self._under_way += bool(together)
            for each in together:
                each.taken = True
        if together:
            self._call(together)
        if item.outage is not None:
            # A copy for each thread, without the frames of another one, which hold samples.
            raise copy.copy(item.outage)
        if not item.stored:
            self._one(value)

    def _call(self, items: Sequence[_Item[T]]) -> None:
        stored, outage = False, None
        try:
            if len(items) == 1:
                self._one(items[0].value)
            else:
                self._several([item.value for item in items])
            stored = True
        except Exception as error:
            if len(items) == 1:
                raise
            if isinstance(error, OUTAGES):
                outage = copy.copy(error)
        finally:
            with self._changed:
                self._under_way -= 1
                for item in items:
                    item.ended, item.stored, item.outage = True, stored, outage
                self._changed.notify_all()
