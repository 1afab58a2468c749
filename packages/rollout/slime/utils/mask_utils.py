"""Compatibility: `slime.utils.mask_utils`, which tokens of a conversation are trained on."""

from slime.rollout.generate.loss_masks import MultiTurnLossMaskGenerator, get_response_lengths

__all__ = [
    "MultiTurnLossMaskGenerator",
    "get_response_lengths",
]
