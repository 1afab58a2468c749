"""The part of the vocabulary whose logits a rank has, without the rows that pad the vocabulary."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch import Tensor

from slime.trainer.algorithms.logprobs import VocabularyShard

# A logit whose exp() is 0 beside any real one; finite, because infinity times that 0 would be NaN.
_NOTHING = -1e30


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Settings for log-probs from logits. vocab_size: without padding; chunk: rows at a time, 0 for all."""

    vocab_size: int
    temperature: float
    chunk: int


def real_columns(logits: Tensor, vocab_size: int, group: dist.ProcessGroup) -> tuple[Tensor, VocabularyShard | None]:
    """[K, padded vocabulary / ranks of `group`] -> ([K, V] logits of real tokens, their shard of the vocabulary).

    The shard is None for a group of one rank. A rank that has only padding keeps it, at a value that counts for
    nothing, because it takes part in the sums of the others.
    """
    first = logits.shape[-1] * group.rank()
    real = vocab_size - first
    columns = logits[:, :real] if real > 0 else 0.0 * logits.float() + _NOTHING
    return columns, VocabularyShard(group, first) if group.size() > 1 else None
