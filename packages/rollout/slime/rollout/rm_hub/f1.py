"""Compatibility: `--rm-type f1` as a function of response and label."""

from slime.rollout.rewards.built_in.f1 import f1_score

__all__ = ["f1_score"]
