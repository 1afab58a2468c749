"""Compatibility: the function of `--load-forge-rollout-data`, under the path that code written for slime imports."""

from slime.rollout.recordings.replay import generate_rollout

__all__ = [
    "generate_rollout",
]
