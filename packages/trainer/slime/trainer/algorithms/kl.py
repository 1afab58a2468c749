"""Per-token estimators of KL(policy || reference). Source: J. Schulman, "Approximating KL Divergence" (2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.trainer.algorithms.ratio import LARGEST_LOG_RATIO, clamp
from slime.types.errors import InvalidSetting


def approximate_kl(
    log_probs: Tensor, ref_log_probs: Tensor, kind: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimates the KL per token. With D = log_probs - ref_log_probs, all shapes equal:

    k1: D      k2: D^2 / 2      k3, low_var_kl: exp(-D) - 1 + D      (low_var_kl is clamped to [-10, 10])

    Below D = -20, k3 and low_var_kl keep the value that they have there, with gradient 0.

    importance_ratio (same shape) multiplies the estimate before the clamp.
    """
    delta = log_probs - ref_log_probs
    if kind == "k1":
        estimate = delta
    elif kind == "k2":
        estimate = delta.square() / 2
    elif kind in ("k3", "low_var_kl"):
        delta = clamp(delta, -LARGEST_LOG_RATIO, torch.inf)
        estimate = torch.expm1(-delta) + delta
    else:
        raise InvalidSetting.one_of("kl estimator", ("k1", "k2", "k3", "low_var_kl"), got=kind)
    if importance_ratio is not None:
        estimate = importance_ratio * estimate
    return clamp(estimate, -10, 10) if kind == "low_var_kl" else estimate
