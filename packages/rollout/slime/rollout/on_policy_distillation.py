"""Compatibility: on-policy distillation, under the paths that scripts for slime name."""

from slime.rollout.rewards.distillation import post_process_rewards, response_log_probs, reward_func

__all__ = [
    "post_process_rewards",
    "response_log_probs",
    "reward_func",
]
