"""Computes the operations of a dense model: products, and what lies between them, by torch or by compiled loops.

N: tokens of a pass, B: sequences that decode, H: query heads, K: key-value heads, C: tokens that a row of the cache
holds, D: size of a head, E: size of the hidden states, I: size of the gate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from slime.rollout.engines.embedded.dense.matrices import Matrix, TorchMatrix


@dataclass(frozen=True)
class Places:
    """The place of each token of a pass: a row of the cache and a position in it, both int64 [N].

    The first `decoding` tokens are those of sequences that decode, of which sequence i has row i. cosines, sines: of
    the rotary embedding, float32 [N, D]; with halves swapped, so that the sines of the first half are negative.
    """

    rows: Tensor
    positions: Tensor
    cosines: Tensor
    sines: Tensor
    decoding: int
    longest: int
    """The largest position of a sequence that decodes."""

    @cached_property
    def seen(self) -> Tensor:
        """Returns True for the positions that a sequence sees, bool [B, 1, 1, longest + 1], of those that decode."""
        return (torch.arange(self.longest + 1) <= self.positions[: self.decoding, None])[:, None, None]


@dataclass(frozen=True)
class Heads:
    """The heads of a model, and the scale of its attention."""

    queries: int
    kv: int
    size: int
    scale: float


class Ops(ABC):
    """Operations of a model whose norms add `eps`, in `dtype` where nothing else is said.

    What an operation returns may be overwritten by its next call.
    """

    def __init__(self, heads: Heads, eps: float, dtype: torch.dtype) -> None:
        self.heads = heads
        self.eps = eps
        self.dtype = dtype

    def matrix(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Matrix:
        """Returns the matrix of one or several linear layers that read the same input; all or none have a bias."""
        weight_OI = torch.cat([w.to(self.dtype) for w in weights]) if len(weights) > 1 else weights[0].to(self.dtype)
        parts = [bias.to(self.dtype) for bias in biases if bias is not None]
        return self._packed(weight_OI, torch.cat(parts) if parts else None)

    def _packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> Matrix:
        return TorchMatrix(weight_OI, bias_O)

    @abstractmethod
    def normed(self, hidden_NE: Tensor, added_NE: Tensor | None, weight_E: Tensor) -> Tensor:
        """Adds `added_NE`, if there is any, to the float32 `hidden_NE` in place; returns its RMS norm [N, E]."""

    @abstractmethod
    def gated(self, gate_up_NI: Tensor) -> Tensor:
        """Returns silu(gate) * up [N, I] of [N, 2 x I]."""

    @abstractmethod
    def rotated(self, qkv_NE: Tensor, norms_HD: Tensor | None, kv_R2KCD: Tensor, places: Places) -> Tensor:
        """Writes the keys and values of all tokens into the cache of a layer, and returns the queries [N, H, D].

        norms_HD: weights of the norms of query and key heads, float32 [H + K, D].
        """

    @abstractmethod
    def attended(self, query_BHD: Tensor, kv_R2KCD: Tensor, places: Places) -> Tensor:
        """Returns what the sequences that decode see [B, H x D]."""


class TorchOps(Ops):
    """Operations of torch alone."""

    def normed(self, hidden_NE: Tensor, added_NE: Tensor | None, weight_E: Tensor) -> Tensor:
        if added_NE is not None:
            hidden_NE += added_NE
        return F.rms_norm(hidden_NE, weight_E.shape, weight_E, self.eps).to(self.dtype)

    def gated(self, gate_up_NI: Tensor) -> Tensor:
        gate, up = gate_up_NI.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def rotated(self, qkv_NE: Tensor, norms_HD: Tensor | None, kv_R2KCD: Tensor, places: Places) -> Tensor:
        heads = self.heads
        rotated, value_NKD = qkv_NE.unflatten(-1, (-1, heads.size)).split([heads.queries + heads.kv, heads.kv], 1)
        rotated = rotated.float()
        if norms_HD is not None:
            rotated = F.rms_norm(rotated, (heads.size,), None, self.eps).mul_(norms_HD)
        cosines, sines = places.cosines[:, None], places.sines[:, None]
        rotated = torch.addcmul(rotated * cosines, rotated.roll(heads.size // 2, -1), sines).to(self.dtype)
        query_NHD, key_NKD = rotated.split([heads.queries, heads.kv], 1)
        kv_R2KCD[places.rows, :, :, places.positions] = torch.stack([key_NKD, value_NKD], 1)
        return query_NHD

    def attended(self, query_BHD: Tensor, kv_R2KCD: Tensor, places: Places) -> Tensor:
        count, length = places.decoding, places.longest + 1
        # Query heads that share keys are stacked as if they were queries of one head, so the keys are read once.
        seen_BKGD = F.scaled_dot_product_attention(
            query_BHD.unflatten(1, (self.heads.kv, -1)),
            kv_R2KCD[:count, 0, :, :length],
            kv_R2KCD[:count, 1, :, :length],
            attn_mask=places.seen,
            scale=self.heads.scale,
        )
        return seen_BKGD.flatten(1)
