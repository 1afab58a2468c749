"""Compatibility: `--rm-type gpqa` as a function of response and label."""

from slime.rollout.rewards.built_in.gpqa import score as compute_gpqa_reward

__all__ = ["compute_gpqa_reward"]
