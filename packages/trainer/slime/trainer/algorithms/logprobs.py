"""Log-probs and entropies of chosen tokens from logits, in float32; the vocabulary may be cut over ranks.

    K  rows        V  tokens of the vocabulary that are on this rank

With z = logits / temperature and Z = sum over the whole vocabulary of exp(z):

    log_prob = z[target] - log Z        entropy = log Z - sum exp(z) z / Z

A rank that holds a part of the vocabulary needs three numbers a row from the others: the maximum, Z (with the sum of
exp(z) z for the entropy) and z[target].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits of a chunk on a CPU, 6 MiB in float32: larger ones leave its caches, and are new pages of memory each time.
_CACHED_LOGITS = 32 * 49_152


@dataclasses.dataclass(frozen=True)
class VocabularyShard:
    """The columns of the logits are token ids `first`, `first + 1`, ...; the ranks of `group` hold the others."""

    group: dist.ProcessGroup
    first: int


def token_log_probs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int = -1, shard: VocabularyShard | None = None
) -> Tensor:
    """log softmax(logits / temperature) at `targets`.

    logits: [K, V] any float dtype; targets: [K] int64 token ids. Returns [K] float32. chunk > 0: that many rows at a
    time, whose float32 copies are made again in the backward pass, for K * V that does not fit. Otherwise a GPU takes
    all rows at once, and a CPU as many as its caches hold, which is faster.
    """
    chunk = _rows_at_once(logits, chunk)
    if len(logits) <= chunk:
        return _log_probs(logits, targets, temperature, shard)
    parts = zip(logits.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([_again_backwards(_log_probs, part, ids, temperature, shard) for part, ids in parts])


def _log_probs(logits: Tensor, targets: Tensor, temperature: float, shard: VocabularyShard | None) -> Tensor:
    scaled = _scaled(logits, temperature)
    if shard is None:
        return -F.cross_entropy(scaled, targets, reduction="none")
    scaled = scaled - _row_maxima(scaled, shard)
    total = replicated_sum(scaled.exp().sum(-1), shard.group)
    local = targets - shard.first
    here = (local >= 0) & (local < scaled.shape[-1])
    chosen = scaled.gather(-1, local.clamp(0, scaled.shape[-1] - 1)[:, None])[:, 0]
    return replicated_sum(torch.where(here, chosen, 0.0), shard.group) - total.log()


def token_entropy(
    logits: Tensor, temperature: float = 1.0, chunk: int = -1, shard: VocabularyShard | None = None
) -> Tensor:
    """Returns the entropy in nats of softmax(logits / temperature): [K, V] -> [K] float32."""
    chunk = _rows_at_once(logits, chunk)
    if len(logits) <= chunk:
        return _entropy(logits, temperature, shard)
    return torch.cat([_again_backwards(_entropy, part, temperature, shard) for part in logits.split(chunk)])


def _rows_at_once(logits: Tensor, chunk: int) -> int:
    if chunk > 0:
        return chunk
    return len(logits) if logits.is_cuda else max(1, _CACHED_LOGITS // logits.shape[-1])


def _again_backwards(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Calls `function` and keeps only its inputs; the backward pass calls it again. It must not be random."""
    output: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return output


def _entropy(logits: Tensor, temperature: float, shard: VocabularyShard | None) -> Tensor:
    scaled = _scaled(logits, temperature)
    if shard is None:
        log_probs = F.log_softmax(scaled, dim=-1)
        return -(log_probs.exp() * log_probs).sum(-1)
    scaled = scaled - _row_maxima(scaled, shard)
    weights = scaled.exp()
    total, weighted = replicated_sum(torch.stack([weights.sum(-1), (weights * scaled).sum(-1)]), shard.group)
    return total.log() - weighted / total


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature


def _row_maxima(scaled: Tensor, shard: VocabularyShard) -> Tensor:
    # Only keeps exp() in range: the result does not depend on it, so it has no gradient.
    maxima = scaled.detach().amax(-1, keepdim=True)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=shard.group)
    return maxima


def replicated_sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the sum of `values` over `group`, from which every rank then computes the same result.

    The gradient on each rank is therefore that of the whole already, and passes backwards unchanged.
    """
    return _ReplicatedSum.apply(values, group)


class _ReplicatedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
