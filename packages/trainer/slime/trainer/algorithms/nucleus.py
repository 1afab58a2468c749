"""Log-probs of tokens that top-p or top-k sampling drew from a part of the vocabulary, the nucleus.

    J  rows        V  tokens of the vocabulary that are on this rank        M  tokens of all nuclei, end to end

With z = logits / temperature and N the nucleus that the engine drew the target of a row from:

    log_prob = z[target] - log sum over v in N of exp(z[v])

The policy that generated is this one, not the one over the whole vocabulary (Holtzman et al., "The Curious Case of
Neural Text Degeneration", ICLR 2020, equation 2): importance ratios and gradients of it need the same N again.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from slime.trainer.algorithms.logprobs import VocabularyShard, replicated_sum


@dataclasses.dataclass(frozen=True)
class Nuclei:
    """The nucleus of each of J rows; int32 tensors on one device."""

    ids: Tensor  # [M] token ids, none twice in a row
    rows: Tensor  # [M] the row of each
    targets: Tensor  # [J] places in `ids` of the tokens that were drawn

    def take(self, rows: Tensor) -> Nuclei:
        """Returns the nuclei of `rows` [j], which has no row twice; they become rows 0 to j - 1."""
        place = self.targets.new_full((len(self.targets),), -1)
        place[rows] = torch.arange(len(rows), device=rows.device, dtype=place.dtype)
        place_of_each = place[self.rows]
        kept = place_of_each >= 0
        targets = (kept.cumsum(0, dtype=place.dtype) - 1)[self.targets[rows]]
        return Nuclei(self.ids[kept], place_of_each[kept], targets)


def nucleus_log_probs(
    logits: Tensor, nuclei: Nuclei, temperature: float = 1.0, shard: VocabularyShard | None = None
) -> Tensor:
    """Returns the log-prob of each row's target in its nucleus: logits [J, V] of any float dtype -> [J] float32."""
    first = 0 if shard is None else shard.first
    local = nuclei.ids - first
    here = (local >= 0) & (local < logits.shape[-1])
    z = logits[nuclei.rows, local.clamp(0, logits.shape[-1] - 1)].float() / temperature
    # Only keeps exp() in range: the result does not depend on it, so it has no gradient.
    bounded = torch.where(here, z.detach(), -torch.inf)
    maxima = bounded.new_full((len(nuclei.targets),), -torch.inf).scatter_reduce(0, nuclei.rows.long(), bounded, "amax")
    if shard is not None:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=shard.group)
    z = torch.where(here, z - maxima[nuclei.rows], -torch.inf)
    chosen = torch.where(here, z, 0.0)[nuclei.targets]
    total = z.new_zeros(len(nuclei.targets)).index_add(0, nuclei.rows, z.exp())
    if shard is not None:
        chosen, total = replicated_sum(torch.stack([chosen, total]), shard.group)
    return chosen - total.log()
