"""Compatibility: supervised fine-tuning, `--rollout-function-path slime.rollout.sft_rollout.generate_rollout`."""

from slime.rollout.generate.supervised import fill, generate_rollout

__all__ = [
    "fill",
    "generate_rollout",
]
