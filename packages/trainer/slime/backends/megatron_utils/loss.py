"""Compatibility: `slime.backends.megatron_utils.loss`, functions for --custom-tis-function-path.

Tensors of a sample are [R], R its response tokens; `pg_loss` is [sum R].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime.trainer.algorithms.importance import importance_weights

__all__ = ["icepop_function", "vanilla_tis_function"]

Answer = tuple[Tensor, list[Tensor], dict[str, Tensor]]


def vanilla_tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **kwargs: Any,
) -> Answer:
    """Applies truncated importance sampling, as --use-tis: the ratio, clamped to [--tis-clip-low, --tis-clip]."""
    return _weighted("token_truncate", args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def icepop_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **kwargs: Any,
) -> Answer:
    """Applies IcePop, as --tis-mode token_mask: the ratio within [--tis-clip-low, --tis-clip], else 0."""
    return _weighted("token_mask", args, pg_loss, train_log_probs, rollout_log_probs, loss_masks)


def _weighted(
    mode: str, args: Any, pg_loss: Tensor, train: list[Tensor], rollout: list[Tensor], masks: list[Tensor]
) -> Answer:
    lengths = torch.tensor([len(mask) for mask in masks])
    segments = torch.repeat_interleave(torch.arange(len(masks)), lengths).to(pg_loss.device)
    weights, metrics = importance_weights(
        torch.cat(train), torch.cat(rollout), torch.cat(masks), segments, len(masks),
        mode=mode, low=args.tis_clip_low, high=args.tis_clip,
    )  # fmt: skip
    return pg_loss * weights, masks, metrics
