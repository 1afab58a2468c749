"""The types that every package of slime shares. Importing this costs numpy and nothing else."""

from slime.types.sample import PrefixCacheInfo, Sample, SampleGroup, SpecInfo, TokenSpan
from slime.types.status import SampleStatus

__all__ = ["PrefixCacheInfo", "Sample", "SampleGroup", "SampleStatus", "SpecInfo", "TokenSpan"]
