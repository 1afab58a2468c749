"""Compatibility: the import path `slime.data` for the classes of `slime.rollout.data_source`."""

from slime.buffer.sources.in_process import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from slime.types import Sample

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "Sample"]
