"""Compatibility: data sources inside one process, under the path that plug-ins written for slime import.

This module is in slime-buffer, not with the rest of `slime.rollout`, because slime-buffer reads prompt files and must
work without slime-rollout.
"""

from slime.buffer.filters import pop_first
from slime.buffer.sources.in_process import (
    DataSource,
    PromptSequence,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
)

__all__ = [
    "DataSource",
    "PromptSequence",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "pop_first",
]
