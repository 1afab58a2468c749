"""Summaries of samples, which the planner of a step reads in place of their tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from slime.types.sample.sample import Sample
from slime.types.sample.status import SampleStatus


@dataclass(frozen=True)
class SampleSummary:
    """A sample as a planner sees it; lengths in tokens, weight versions -1 where there is none."""

    index: int
    group_index: int
    rollout_id: int | None = None
    total_length: int = 0
    response_length: int = 0
    loss_mask_sum: int = 0
    reward: float | dict[str, Any] | None = None
    status: SampleStatus = SampleStatus.COMPLETED
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    oldest_weight_version: int = -1
    newest_weight_version: int = -1
    non_generation_time: float = 0.0

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.loss_mask_sum

    @property
    def weight_versions(self) -> list[str]:
        """The oldest and the newest weight version, as a sample names them; one if they are equal."""
        return list(_version_names(self.oldest_weight_version, self.newest_weight_version))

    @classmethod
    def of(cls, sample: Sample) -> SampleSummary:
        """Summarizes a sample whose indexes are set; leaves the weight versions at -1."""
        assert sample.index is not None and sample.group_index is not None
        return cls(
            index=sample.index,
            group_index=sample.group_index,
            rollout_id=sample.rollout_id,
            total_length=len(sample.array("tokens")),
            response_length=sample.response_length,
            loss_mask_sum=sample.effective_response_length,
            reward=sample.reward,
            status=sample.status,
            remove_sample=sample.remove_sample,
            metadata=sample.metadata,
            non_generation_time=sample.non_generation_time,
        )


# A step has many samples and few versions.
@functools.lru_cache(maxsize=1024)
def _version_names(oldest: int, newest: int) -> tuple[str, ...]:
    return tuple(str(version) for version in sorted({oldest, newest} - {-1}))
