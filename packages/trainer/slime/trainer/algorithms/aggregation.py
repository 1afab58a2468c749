"""Aggregation of per-token values into one number.

    per-trajectory mean (default)
        L = 1/B * sum_trajectories [ sum_{samples, t} m * l / max(1, sum of m over the trajectory) ]
    constant divisor N (Dr. GRPO, arXiv:2503.20783)
        L = 1/B * sum_trajectories [ sum_{samples, t} m * l / N ]
    per-token mean
        L = sum_{samples, t} m * l / sum_samples max(1, sum_t m)

B is the number of trajectories in the optimizer update. All three are sums over samples of weight * sum_t m * l, with
weights that are known before the update is split: micro-batches and ranks add up to the same number however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def sample_weights(
    rollout_mask_sums: Sequence[int],
    mask_sums: Sequence[int],
    num_rollouts: int,
    *,
    per_token: bool = False,
    divisor: float | None = None,
) -> list[float]:
    """Returns the weight of every sample of one update, for one of the three forms.

    rollout_mask_sums: for each sample, the sum of the masks of its whole trajectory; mask_sums: of the sample alone.
    """
    if per_token:
        tokens = sum(max(1, s) for s in mask_sums)
        return [1.0 / tokens] * len(mask_sums)
    return [1.0 / (num_rollouts * (divisor or max(1, s))) for s in rollout_mask_sums]


def weighted_sum(values: Tensor, token_weights: Tensor) -> Tensor:
    """sum_t w_t * v_t in float32 or wider. values, token_weights: [K], token weight = sample weight * mask.

    Tokens of weight 0 add nothing, even where the value is not finite.
    """
    return (values.where(token_weights != 0, 0.0) * token_weights).sum()
