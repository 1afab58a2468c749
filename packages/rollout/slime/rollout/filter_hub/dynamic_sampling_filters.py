"""Compatibility: filters that drop groups with equal rewards, under the paths that scripts for slime name."""

from slime.rollout.generate.filters import check_reward_nonzero_std, check_reward_nonzero_std_with_fallback

__all__ = [
    "check_reward_nonzero_std",
    "check_reward_nonzero_std_with_fallback",
]
