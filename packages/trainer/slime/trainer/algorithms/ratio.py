"""Ratios of probabilities from differences of log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is 5e8: far outside every clip range, and far from overflow, where a clip's backward pass gives 0 * inf = NaN.
LARGEST_LOG_RATIO = 20.0


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), with log_ratio clamped to [-20, 20]: outside, the ratio is constant and its gradient is 0."""
    return torch.exp(clamp(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def clamp(values: Tensor, low: float, high: float) -> Tensor:
    """Returns `values.clamp(low, high)`, except that the gradient of NaN is NaN: Tensor.clamp makes it 0 silently."""
    outside = (values < low) | (values > high)
    return torch.where(outside, values.detach().clamp(low, high), values)
