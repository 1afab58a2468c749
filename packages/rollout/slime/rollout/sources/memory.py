"""The interface of a source of groups, and a source of prompts in memory."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

from slime.types import Sample
from slime.types.errors import DeadlineExceeded


class GroupSource(Protocol):
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns at least one and at most `num_samples` groups."""

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Gives groups back with their partial responses."""

    def give_back(self, groups: list[list[Sample]]) -> None:
        """Gives groups back as they were."""

    def complete(self, samples: list[Sample], leased: list[Sample] | None = None) -> None:
        """Completes a group. leased: the samples that `get_samples` returned, if the function made new ones."""

    def reject(self, group: list[Sample], reason: str) -> None:
        """Drops a group for good."""


class MemorySource:
    """Prompts of a list, n samples each, in order. Rejected groups are counted by reason."""

    def __init__(self, prompts: Iterable[dict[str, Any]], n_samples: int) -> None:
        self._groups: list[list[Sample]] = []
        for group_index, prompt in enumerate(prompts):
            self._groups.append(
                [
                    Sample(group_index=group_index, index=group_index * n_samples + i, **copy.deepcopy(prompt))
                    for i in range(n_samples)
                ]
            )
        self._fresh = [copy.deepcopy(group) for group in self._groups]
        self._waiting = list(range(len(self._groups)))
        self.completed: list[list[Sample]] = []
        self.rejected: dict[str, int] = {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Raises DeadlineExceeded when no prompt is left."""
        if not self._waiting:
            raise DeadlineExceeded("no prompt is left", field="prompts", expected="a prompt")
        taken, self._waiting = self._waiting[:num_samples], self._waiting[num_samples:]
        return [self._groups[index] for index in taken]

    def add_samples(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            index = group[0].group_index
            assert index is not None
            self._groups[index] = group
            self._waiting.append(index)

    def give_back(self, groups: list[list[Sample]]) -> None:
        self.add_samples([copy.deepcopy(self._fresh[group[0].group_index or 0]) for group in groups])

    def complete(self, samples: list[Sample], leased: list[Sample] | None = None) -> None:
        for sample in samples:
            sample.validate()
        self.completed.append(samples)

    def reject(self, group: list[Sample], reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
