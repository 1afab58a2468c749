"""Where groups come from and go to. What a rollout function calls `data_source` is one of these.

    DataSource            the interface
    ├── LeasedDataSource  a buffer over gRPC: leases, renewed in the background until the group's fate is told
    └── MemorySource      a list of prompts, for work without a buffer

`EvaluationSource` is what an evaluation function gets: whole sets, nothing leased.
"""

from slime.rollout.sources.base import DataSource
from slime.rollout.sources.evaluation import EvaluationSource
from slime.rollout.sources.leased import LeasedDataSource
from slime.rollout.sources.memory import MemorySource

__all__ = ["DataSource", "EvaluationSource", "LeasedDataSource", "MemorySource"]
