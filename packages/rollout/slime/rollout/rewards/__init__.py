"""Rewards: a number (or a dict with `--reward-key`) for a finished sample.

The user's function wins (`sample.custom_rm_path`, `--custom-rm-path`), then `metadata["rm_type"]`, then `--rm-type`.
"""

from slime.rollout.rewards.registry import BUILT_IN, reward_function
from slime.rollout.rewards.score import apply_overlong_rules, score_group, score_sample, scores_by_group

__all__ = ["BUILT_IN", "apply_overlong_rules", "reward_function", "score_group", "score_sample", "scores_by_group"]
