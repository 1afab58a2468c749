"""Compatibility: the answer of a dynamic sampling filter, under the path that filters written for slime import."""

from slime.rollout.generate.filters import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)

__all__ = [
    "DynamicFilterOutput",
    "MetricGatherer",
    "call_dynamic_filter",
    "should_drop_dynamic_filter_output",
]
