"""Compatibility: filters that drop groups whose rewards are all the same: these carry no advantage.

With --overlong-buffer-len the rewards before its penalty count, as in DAPO (arXiv 2503.14476, equation 11): a group of
right answers of several lengths is dropped.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.types import Sample


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    rewards = [_reward(args, sample) for sample in samples]
    keep = max(rewards) - min(rewards) > 1e-6
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drops groups with equal rewards too, but keeps them where the iteration would otherwise lack groups."""
    output = check_reward_nonzero_std(args, samples)
    output.keep_when_insufficient = True
    return output


def _reward(args: Any, sample: Sample) -> float:
    before = sample.metadata.get("raw_reward") if getattr(args, "overlong_buffer_len", None) is not None else None
    return float(sample.get_reward_value(args) if before is None else before)
