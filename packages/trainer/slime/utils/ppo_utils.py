"""Compatibility: `slime.utils.ppo_utils`, the formulas of a trainer under the names that plug-ins import.

Lists have a tensor [R] for each sample, R its response tokens. See `slime.trainer.algorithms` for the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.trainer.algorithms import advantages, policy_loss
from slime.trainer.algorithms.kl import approximate_kl
from slime.trainer.algorithms.logprobs import VocabularyShard, token_entropy, token_log_probs

__all__ = [
    "calculate_log_probs_and_entropy", "compute_approx_kl", "compute_entropy_from_logits", "compute_gspo_kl",
    "compute_log_probs", "compute_opsm_mask", "compute_policy_loss", "get_grpo_returns",
    "get_reinforce_plus_plus_baseline_advantages", "get_reinforce_plus_plus_returns",
]  # fmt: skip


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, kl_loss_type: str, importance_ratio: Tensor | None = None
) -> Tensor:
    """Estimates KL(policy || base) per token by k1, k2, k3 or low_var_kl."""
    return approximate_kl(log_probs, log_probs_base, kl_loss_type, importance_ratio)


def compute_policy_loss(
    ppo_kl: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns PPO's clipped surrogate and where it was clipped, per token. ppo_kl: old log-probs less new ones."""
    return policy_loss.clipped_loss(ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c)


def compute_gspo_kl(
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    local_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> Tensor:
    """Returns for every token the masked mean of old less new log-probs over its sample, end to end."""
    difference = torch.cat(list(full_old_log_probs)) - torch.cat(list(full_log_probs))
    means = policy_loss.sequence_mean(difference, torch.cat(list(loss_masks)), _segments(loss_masks), len(loss_masks))
    each = [mean[:1] for mean in means.split([len(mask) for mask in loss_masks])]
    return torch.cat([mean.expand(len(local)) for mean, local in zip(each, local_log_probs, strict=True)])


def compute_opsm_mask(
    args: Any,
    full_log_probs: Sequence[Tensor],
    full_old_log_probs: Sequence[Tensor],
    advantages: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Returns (weights [sum R], share of dropped tokens): 0 where the advantage is negative and the policy has moved
    away from the sample by more than `args.opsm_delta`."""
    difference = torch.cat(list(full_old_log_probs)) - torch.cat(list(full_log_probs))
    weights = policy_loss.off_policy_weights(
        difference, torch.cat(list(advantages)), torch.cat(list(loss_masks)), _segments(loss_masks), len(loss_masks),
        args.opsm_delta,
    )  # fmt: skip
    return weights, 1 - weights.mean()


def get_grpo_returns(rewards: Tensor, kl: Sequence[Tensor]) -> list[Tensor]:
    """Returns each sample's reward at each of its tokens."""
    return [torch.ones_like(values) * reward for reward, values in zip(rewards, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: Tensor,
    kl: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    response_lengths: Sequence[int],
    total_lengths: Sequence[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """Returns discounted returns with the KL as a penalty and the reward at the last token that is trained."""
    values = advantages.reinforce_plus_plus(
        rewards, torch.cat(list(kl)), torch.cat(list(loss_masks)), list(response_lengths), kl_coef=kl_coef, gamma=gamma
    )
    return list(values.split(list(response_lengths)))


def get_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, kl: Sequence[Tensor], loss_masks: Sequence[Tensor], kl_coef: float
) -> list[Tensor]:
    """Returns each sample's centred reward less the KL penalty at each of its tokens."""
    lengths = [len(mask) for mask in loss_masks]
    values = advantages.reinforce_plus_plus_baseline(rewards, torch.cat(list(kl)), lengths, kl_coef=kl_coef)
    return list(values.split(lengths))


def compute_log_probs(logits: Tensor, tokens: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """[K, V], [K] -> [K, 1]: log-probs of tokens; the ranks of `process_group` hold equal parts of the vocabulary."""
    return token_log_probs(logits, tokens, shard=_shard(logits, process_group))[:, None]


def compute_entropy_from_logits(logits: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """[K, V] -> [K]: entropies."""
    return token_entropy(logits, shard=_shard(logits, process_group))


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    chunk_size: int = -1,
) -> tuple[Tensor, Tensor | None]:
    """Returns log-probs [K, 1] of tokens, and entropies [K] where they are asked for."""
    shard = _shard(logits, tp_group)
    log_probs = token_log_probs(logits, tokens, chunk=chunk_size, shard=shard)[:, None]
    return log_probs, token_entropy(logits, chunk=chunk_size, shard=shard) if with_entropy else None


def _segments(parts: Sequence[Tensor]) -> Tensor:
    lengths = torch.tensor([len(part) for part in parts], device=parts[0].device)
    return torch.repeat_interleave(torch.arange(len(parts), device=parts[0].device), lengths)


def _shard(logits: Tensor, group: dist.ProcessGroup | None) -> VocabularyShard | None:
    if group is None or dist.get_world_size(group) == 1:
        return None
    return VocabularyShard(group, dist.get_rank(group) * logits.shape[-1])
