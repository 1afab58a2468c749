"""What a rollout needs of the place that groups come from."""

from __future__ import annotations

from typing import Protocol

from slime.types import Sample


class DataSource(Protocol):
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to so many groups, at least one."""

    def add_samples(self, groups: list[list[Sample]]) -> None:
        """Gives groups back with what they have."""

    def give_back(self, groups: list[list[Sample]]) -> None:
        """Gives groups back as they were."""

    def complete(self, samples: list[Sample], leased: list[Sample] | None = None) -> None:
        """Hands in a finished group. leased: the samples that `get_samples` gave, where the function made new ones."""

    def reject(self, group: list[Sample], reason: str) -> None:
        """Drops a group for good."""
