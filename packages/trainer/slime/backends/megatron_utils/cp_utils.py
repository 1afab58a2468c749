"""Compatibility: `slime.backends.megatron_utils.cp_utils`, for functions that see parts of sequences there.

Here a function of the user gets whole responses, also with context parallelism, so that there is nothing to gather or
to cut. Values of a sample are [R], R its response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slime.trainer.algorithms.aggregation import sample_weights, weighted_sum
from slime.types.errors import counted

__all__ = ["all_gather_with_cp", "get_sum_of_sample_mean", "slice_log_prob_with_cp"]


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Returns the values of a whole response, which these are. Raises ValueError for another length."""
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    """Returns the part of a response that a function hands back, which is all of it. Raises ValueError."""
    return _whole(log_prob, response_length)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """Returns a function of values of all responses end to end [sum R]: the sum of the samples' masked means, or with
    `calculate_per_token_loss` the masked sum."""
    sums = [max(1, int(mask.sum())) for mask in loss_masks]
    each = [1.0] * len(sums) if calculate_per_token_loss else sample_weights(sums, sums, 1)
    weights = torch.cat([mask.float() * weight for mask, weight in zip(loss_masks, each, strict=True)])
    return lambda values: weighted_sum(values, weights.to(values.device))


def _whole(values: Tensor, response_length: int) -> Tensor:
    if len(values) != response_length:
        raise ValueError(f"got {counted(len(values), 'value')} of a response of {counted(response_length, 'token')}")
    return values
