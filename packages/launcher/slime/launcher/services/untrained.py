"""Refills steps that were generated but not yet trained on, if their samples turn out to be damaged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from slime.types.errors import DataLoss, WrongState, counted

log = logging.getLogger(__name__)
T = TypeVar("T")

# If files are damaged again and again, the disk is failing.
ATTEMPTS = 3


class GroupCalls(Protocol):
    """The calls of `Services` that generate and count groups."""

    def generate_more(self, step: int, num_groups: int) -> None: ...
    def seal_again(self, step: int) -> None: ...
    def groups_of(self, step: int) -> int: ...
    def groups_at_hand(self) -> int: ...


class UntrainedSteps:
    """Steps that are generated but not yet trained on. Thread-safe: groups may be generated beside the training.

    The buffer sets damaged groups aside and unseals their step and all later ones. The groups that these steps then
    lack are generated, and the steps are sealed again, in order.
    """

    def __init__(self, calls: GroupCalls, sealed: Iterable[int] = ()) -> None:
        """calls: its groups_at_hand counts the groups that are complete and not trained on, except those that belong to
        none of these steps. sealed: steps that an earlier start of the run sealed."""
        self._calls = calls
        self._generated = set(sealed)
        self._sealed: set[int] = set()
        self._lock = threading.RLock()
        self.retries: dict[int, int] = {}

    def changing(self) -> AbstractContextManager[object]:
        """Locks the steps while groups of one are generated."""
        return self._lock

    def generated(self, step: int) -> None:
        self._generated.add(step)

    def seal(self, step: int, work: Callable[[], T]) -> T:
        """Calls `work()`, which seals `step` and reads from it; refills the step if samples are damaged."""
        with self._lock:
            try:
                result = self._until_whole(step, work)
            except WrongState:
                # An earlier group turned out to be damaged when it was trained on.
                if not self._sealed:
                    raise
                self._mend(min(self._sealed))
                result = self._until_whole(step, work)
            self._sealed.add(step)
        return result

    def train(self, step: int, work: Callable[[], T]) -> T:
        """Calls `work()`, which trains on `step`; refills the step if samples are damaged."""
        result = self._until_whole(step, work)
        with self._lock:
            self._generated.discard(step)
            self._sealed.discard(step)
            self.retries.pop(step, None)
        return result

    def _until_whole(self, step: int, work: Callable[[], T]) -> T:
        while True:
            try:
                return work()
            except DataLoss as error:
                tried = self.retries[step] = self.retries.get(step, 0) + 1
                if tried > ATTEMPTS:
                    raise
                log.warning("step %d is refilled, attempt %d of %d: %s", step, tried, ATTEMPTS, error)
                self._mend(step)

    def _mend(self, first: int) -> None:
        """Refills `first` and the steps after it."""
        with self._lock:
            calls = self._calls
            required = sum(calls.groups_of(step) for step in self._generated if step >= first)
            missing = required - calls.groups_at_hand()
            if missing > 0:
                log.warning("generating %s in place of damaged ones", counted(missing, "group"))
                calls.generate_more(first, missing)
            for step in sorted(step for step in self._sealed if step >= first):
                calls.seal_again(step)
