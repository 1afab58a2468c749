"""Causal core attention without Transformer Engine: packed rows, grouped queries, latent and context parallel ones.

    T   tokens of the row that this rank holds      h, g   heads of queries, of keys and values
    n   ranks of context parallelism                d, v   width of a head of queries and keys, of values

With n > 1 a sequence is cut into 2n chunks and rank r holds chunks r and 2n-1-r, as Megatron cuts it. Each rank gathers
all keys and values, and each of its chunks attends to what lies before it.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.trainer.backends.attention import attend
from slime.trainer.batching.runs import Runs
from slime.types.errors import InvalidField


class CoreAttention(MegatronModule):
    """Takes the place of DotProductAttention and TEDotProductAttention in a layer's specification.

    chosen: [T, k] int32, the keys that queries attend to in the next pass (`attend`); None for all.
    """

    chosen: Tensor | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self._group = pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attends. Packed: query [T, h, d], key [T, g, d], value [T, g, v] -> [T, h * v]; else [s, b, h, d].. ->
        [s, b, h * v].

        Raises InvalidField for a mask, or a sequence that does not divide into 2n chunks.
        """
        if attention_mask is not None or attention_bias is not None:
            raise InvalidField(
                "attention_mask", tuple(attention_mask.shape) if attention_mask is not None else "", "None"
            )
        if packed_seq_params is not None:
            runs = planned(packed_seq_params, self._group, query.device)
            chosen, self.chosen = self.chosen, None
            return self._packed(query, key, value, runs, chosen).flatten(1)
        length, batch = query.shape[:2]
        limits = [length * self._group.size() * i for i in range(batch + 1)]
        runs = runs_of(limits, self._group.rank(), self._group.size(), query.device)
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        return self._packed(query, key, value, runs).view(batch, length, -1).transpose(0, 1).contiguous()

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs, chosen: Tensor | None = None) -> Tensor:
        if self._group.size() > 1:
            width = key.shape[-1]
            both = GatherTokens.apply(torch.cat([key, value], dim=-1), self._group)
            key, value = both.split([width, value.shape[-1]], dim=-1)
        return attend(query, key, value, runs, self.softmax_scale, chosen=chosen)


def runs_of(limits: list[int], rank: int, size: int, device: torch.device) -> Runs:
    """Runs of the tokens on this rank. limits: the start of each sequence, and the end, over all ranks together; keys
    count their tokens one rank after the other.

    Raises InvalidField for a sequence that does not divide into 2n chunks.
    """
    lengths = [end - start for start, end in itertools.pairwise(limits) if end > start]
    if size == 1:
        return Runs.apart(lengths, device)
    total = sum(lengths) // size
    q_lengths, keys, held = [], [], 0
    for length in lengths:
        if length % (2 * size):
            raise InvalidField("cu_seqlens", length, f"sequences of a multiple of {2 * size} tokens")
        chunk = length // (2 * size)
        order = [held + r * total + np.arange(chunk) for r in range(size)]
        order += [held + r * total + chunk + np.arange(chunk) for r in reversed(range(size))]
        whole = np.concatenate(order)
        for number in (rank, 2 * size - 1 - rank):
            q_lengths.append(chunk)
            keys.append(whole[: (number + 1) * chunk])
        held += 2 * chunk
    return Runs.gathered(q_lengths, keys, device)


def planned(packing: PackedSeqParams, group: dist.ProcessGroup, device: torch.device) -> Runs:
    """Plans the runs of a row once, and keeps them on it: reading the limits waits for the device."""
    runs = getattr(packing, "slime_runs", None)
    if runs is None:
        padded = packing.cu_seqlens_q_padded
        limits = (padded if padded is not None else packing.cu_seqlens_q).tolist()
        runs = runs_of(limits, group.rank(), group.size(), device)
        packing.slime_runs = runs  # type: ignore[attr-defined]
    return runs


class GatherTokens(torch.autograd.Function):
    """[T, ...] of each rank -> [n * T, ...]; each rank's gradient is the sum of what all ranks have for its tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = tokens.new_empty(group.size() * tokens.shape[0], *tokens.shape[1:])
        dist.all_gather_into_tensor(gathered, tokens.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        part = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient, group=ctx.group)
        return part, None
