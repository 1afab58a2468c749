"""The import path `slime.data`, for code written against it."""

from slime.rollout.data_source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.types import Sample

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "Sample"]
