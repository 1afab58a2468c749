"""`slime.utils.types`: where code written for slime imports `Sample` from."""

from slime.types import PrefixCacheInfo, Sample, SampleGroup, SpecInfo, TokenSpan

__all__ = ["PrefixCacheInfo", "Sample", "SampleGroup", "SpecInfo", "TokenSpan"]
