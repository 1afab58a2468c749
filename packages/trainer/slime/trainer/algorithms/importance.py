"""Weights for the mismatch between the engine that sampled and the trainer that learns; tensors [K], no gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_importance(
    train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """TIS: w = clamp(exp(train - rollout), low, high), with per-token metrics. Source: Yao et al., "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (2025).
    """
    ratio = torch.exp(train_log_probs.detach() - rollout_log_probs)
    weights = ratio.clamp(low, high)
    return weights, {"tis": ratio, "tis_clipfrac": (weights != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}


def icepop(
    train_log_probs: Tensor, rollout_log_probs: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """IcePop: the ratio where it lies inside [low, high], else 0."""
    ratio = torch.exp(train_log_probs.detach() - rollout_log_probs)
    inside = (ratio >= low) & (ratio <= high)
    return torch.where(inside, ratio, 0.0), {
        "tis": ratio,
        "tis_clipfrac": (~inside).to(ratio.dtype),
        "tis_abs": (ratio - 1).abs(),
    }
