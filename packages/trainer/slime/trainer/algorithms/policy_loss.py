"""Policy losses per token; nothing is masked or averaged here.

Shapes: every tensor [K], the response tokens of S samples end to end; `segments` [K] int64 is the sample of a token.
ppo_kl = old_log_probs - log_probs, so the importance ratio is exp(-ppo_kl), bounded as `probability_ratio` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slime.trainer.algorithms.ratio import probability_ratio


def clipped_loss(
    ppo_kl: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns PPO's surrogate (arXiv:1707.06347), as (loss, clip fraction), both [K].

    loss = max(-ratio * A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A); where A < 0 and eps_clip_c = c is given,
    at most -c * A (dual clip, arXiv:1912.09729). eps_clip_high defaults to eps_clip.
    """
    ratio = probability_ratio(-ppo_kl)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high)) * advantages
    loss = torch.maximum(unclipped, clipped)
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (clipped > unclipped).to(loss.dtype)


def cispo_loss(
    ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns CISPO's loss (arXiv:2506.13585), -stop_gradient(clip(ratio)) * A * log_probs, and where the clip changed
    the ratio."""
    ratio = probability_ratio(-ppo_kl).detach()
    clipped = ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))
    return -clipped * advantages * log_probs, (clipped != ratio).to(log_probs.dtype)


def sequence_mean(values: Tensor, mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[K] -> [K]: each value replaced by the masked mean over its sample; 0 where a sample has no token with mask 1.

    For ppo_kl the result is minus the logarithm of GSPO's ratio (arXiv:2507.18071).
    """
    zeros = values.new_zeros(num_segments)
    totals = zeros.index_add(0, segments, values.where(mask != 0, 0.0) * mask)
    counts = zeros.index_add(0, segments, mask.to(values.dtype))
    return (totals / counts.clamp(min=1))[segments]


def off_policy_weights(
    ppo_kl: Tensor, advantages: Tensor, mask: Tensor, segments: Tensor, num_segments: int, delta: float
) -> Tensor:
    """Returns weights [K]: 0 where A < 0 in sequences whose masked mean of ppo_kl is above `delta`, else 1.

    Source: off-policy sequence masking (OPSM) of DeepSeek-V3.2 (2025).
    """
    far = sequence_mean(ppo_kl.detach(), mask, segments, num_segments) > delta
    return 1.0 - (far & (advantages < 0)).to(ppo_kl.dtype)
