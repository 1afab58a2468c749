"""Calls of several threads that are made as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from slime.types.errors import SlimeError

T = TypeVar("T")

# Calls under way at the same time: while the buffer works on one, the next is encoded.
MOST_CALLS = 2


@dataclass(eq=False)
class _Item(Generic[T]):
    """A thread's value. taken: a call with it has begun; ended: that call is over, and `stored` says whether it
    succeeded."""

    value: T
    taken: bool = False
    ended: bool = False
    stored: bool = False


class JointCalls(Generic[T]):
    """Calls `one` or `several` with what threads hand over: while `MOST_CALLS` calls are under way, the values of other
    threads are collected for the next. Thread-safe.

    several: stores all of its values, or raises SlimeError. Then each thread calls `one` with its own, which may be
    stored already, so that it gets the error of that value alone.
    """

    def __init__(self, one: Callable[[T], Any], several: Callable[[list[T]], Any]) -> None:
        self._one, self._several = one, several
        self._changed = threading.Condition()
        self._collected: list[_Item[T]] = []
        self._under_way = 0

    def __call__(self, value: T) -> None:
        """Returns once `value` is stored. Raises what `one` raises."""
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
        if not item.stored:
            self._one(value)

    def _call(self, items: Sequence[_Item[T]]) -> None:
        stored = False
        try:
            if len(items) == 1:
                self._one(items[0].value)
                stored = True
            else:
                with suppress(SlimeError):
                    self._several([item.value for item in items])
                    stored = True
        finally:
            with self._changed:
                self._under_way -= 1
                for item in items:
                    item.ended, item.stored = True, stored
                self._changed.notify_all()
