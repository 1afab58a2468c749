"""Groups leased from a buffer at the pace of the trainer, for generation that continues while it trains."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from slime.rollout.calls.call import CALL
from slime.rollout.sources.leased import POLL_SECONDS, LeasedDataSource, ended
from slime.types import Sample
from slime.types.errors import LeaseLost
from slime.types.pace import TrainerPace

log = logging.getLogger(__name__)


class PacedSource(LeasedDataSource):
    """Groups that are leased at the trainer's pace. weight_version: returns the weight version of the engines. A group
    that the trainer has rejected meanwhile as too old is forgotten when it is completed."""

    def __init__(self, buffer: Any, pace: TrainerPace, weight_version: Callable[[], int], **options: Any) -> None:
        super().__init__(buffer, **options)
        self._pace = pace
        self._weight_version = weight_version
        self._changed = threading.Event()

    def moved(self) -> None:
        """Notes that the engines have new weights: more may be leased then."""
        self._changed.set()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Waits, without a limit, until the trainer's progress allows a lease. Raises WrongState once the call has
        ended."""
        call = CALL.get()
        while call is None or not call.cancelled.is_set():
            self._changed.clear()
            pace = replace(self._pace, weight_version=self._weight_version())
            groups = self._lease(num_samples, 0.0, pace=pace)
            if groups:
                return groups
            self._changed.wait(POLL_SECONDS)
        raise ended()

    def complete(self, samples: list[Sample], leased: list[Sample] | None = None) -> None:
        group = leased if leased is not None else samples
        try:
            super().complete(samples, leased)
        except LeaseLost as error:
            self._forget(group, error)
        # Nothing reads this list here, and it would grow for weeks.
        self.completed.clear()

    def reject(self, group: list[Sample], reason: str) -> None:
        try:
            super().reject(group, reason)
        except LeaseLost as error:
            self._forget(group, error)
        self._changed.set()

    def give_back(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            try:
                super().give_back([group])
            except LeaseLost as error:
                self._forget(group, error)
        self._changed.set()

    def add_samples(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            try:
                super().add_samples([group])
            except LeaseLost as error:
                self._forget(group, error)
        self._changed.set()

    def close(self) -> None:
        self._changed.set()
        super().close()

    def _regain(self, index: int) -> bool:
        # The group may have been rejected as too old, and a new lease must stay within the pace.
        return False

    def _forget(self, group: list[Sample], error: LeaseLost) -> None:
        index = self.find(group)
        log.info("group %s is left: %s", index, error)
        if index is not None:
            self.forget(index)
