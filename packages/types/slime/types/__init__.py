"""The types that every package of slime shares. Importing this costs numpy and nothing else."""

from slime.types.arrays import TokenArray
from slime.types.sample import PrefixCacheInfo, Sample, SampleGroup, SpecInfo, TokenSpan
from slime.types.status import SampleStatus

__all__ = ["PrefixCacheInfo", "Sample", "SampleGroup", "SampleStatus", "SpecInfo", "TokenArray", "TokenSpan"]
