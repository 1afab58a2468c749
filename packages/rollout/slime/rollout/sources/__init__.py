"""Sources of groups, which also take finished groups. A rollout function gets one of these as `data_source`.

    GroupSource            the interface
    ├── LeasedDataSource  a buffer over gRPC: leases, renewed in the background until a group is done or given back
    └── MemorySource      a list of prompts, for work without a buffer

`EvaluationSource` is what an evaluation function gets: whole sets, without leases.
"""

from slime.rollout.sources.evaluation import EvaluationSource
from slime.rollout.sources.leased import LeasedDataSource
from slime.rollout.sources.memory import GroupSource, MemorySource

__all__ = ["GroupSource", "EvaluationSource", "LeasedDataSource", "MemorySource"]
