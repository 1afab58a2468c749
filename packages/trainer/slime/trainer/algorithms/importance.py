"""Weights for the mismatch between the engine that sampled and the trainer that learns; no gradient.

Shapes: every tensor [K], the response tokens of S samples end to end; `segments` [K] int64 is the sample of a token.
"""

from __future__ import annotations

from torch import Tensor

from slime.trainer.algorithms.ratio import probability_ratio


def importance_weights(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    mode: str,
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w = f(exp(d)) with d = train - rollout, and per-token metrics.

    token_*     d is the token's own
    sequence_*  d is the sum over the sample's tokens with mask 1
    *_truncate  f clamps to [low, high]
    *_mask      f is the ratio itself inside [low, high], and 0 outside

    Sources: token_truncate is TIS (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025), token_mask IcePop (Ling team, 2025), sequence_mask MIS (Liu et al., "When Speed
    Kills Stability", 2025).
    """
    level, _, kind = mode.partition("_")
    difference = (train_log_probs.detach() - rollout_log_probs).where(mask != 0, 0.0)
    if level == "sequence":
        difference = difference.new_zeros(num_segments).index_add(0, segments, difference)[segments]
    ratio = probability_ratio(difference)
    if kind == "truncate":
        weights = ratio.clamp(low, high)
    else:
        weights = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    return weights, {"tis": ratio, "tis_clipfrac": (weights != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
