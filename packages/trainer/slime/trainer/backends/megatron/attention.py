"""Causal core attention without Transformer Engine: packed rows, grouped queries, latent and context parallel ones.

    T   tokens of the row that this rank holds      h, g   heads of queries, of keys and values
    n   ranks of context parallelism                d, v   width of a head of queries and keys, of values

With n > 1 a sequence is cut into 2n chunks and rank r holds chunks r and 2n-1-r, as Megatron cuts it. Each rank gathers
all keys and values, and each of its chunks attends to what lies before it. On CUDA in bfloat16 that is one call of
FlashAttention for the whole row, elsewhere a call of scaled_dot_product_attention for each chunk.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.types.errors import InvalidField

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch before 2.10
    varlen_attn = None

# Earlier versions of it lack one or the other.
_HAVE_FLASH = varlen_attn is not None and {"scale", "window_size", "enable_gqa"} <= set(
    inspect.signature(varlen_attn).parameters
)
_MAX_FLASH_WIDTH = 256


class CoreAttention(MegatronModule):
    """Takes the place of DotProductAttention and TEDotProductAttention in a layer's specification."""

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
        """Packed: query [T, h, d], key [T, g, d], value [T, g, v] -> [T, h * v]; else [s, b, h, d].. -> [s, b, h * v].

        Raises InvalidField for a mask, or a sequence that does not divide into 2n chunks.
        """
        if attention_mask is not None or attention_bias is not None:
            raise InvalidField(
                "attention_mask", tuple(attention_mask.shape) if attention_mask is not None else "", "None"
            )
        if packed_seq_params is not None:
            plan = _planned(packed_seq_params, self._group, query.device)
            return self._packed(query, key, value, plan).flatten(1)
        length, batch = query.shape[:2]
        limits = [length * self._group.size() * i for i in range(batch + 1)]
        plan = Plan.of(limits, self._group.rank(), self._group.size(), query.device)
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query, key, value))
        return self._packed(query, key, value, plan).view(batch, length, -1).transpose(0, 1).contiguous()

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
        if plan.keys is not None:
            width = key.shape[-1]
            both = _GatherTokens.apply(torch.cat([key, value], dim=-1), self._group).index_select(0, plan.keys)
            key, value = both.split([width, value.shape[-1]], dim=-1)
        if _flash_takes(query):
            return self._flash(query, key, value, plan)
        return self._by_chunk(query, key, value, plan)

    def _by_chunk(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
        outputs = []
        queries, keys, values = query.split(plan.q_lengths), key.split(plan.k_lengths), value.split(plan.k_lengths)
        for q, k, v in zip(queries, keys, values, strict=True):
            mask = None
            if len(q) != len(k):
                mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
            output = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, plan: Plan) -> Tensor:
        width, value_width = query.shape[-1], value.shape[-1]
        # The kernel has one width for all three; zeros behind the values are cut off again.
        value = F.pad(value, (0, width - value_width))
        output = varlen_attn(
            query.contiguous(), key.contiguous(), value.contiguous(),
            plan.q_limits, plan.k_limits, max(plan.q_lengths), max(plan.k_lengths),
            scale=self.softmax_scale, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return output[..., :value_width]


def _flash_takes(query: Tensor) -> bool:
    return (
        _HAVE_FLASH
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= _MAX_FLASH_WIDTH
        and query.shape[-1] % 8 == 0
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which keys each run of queries sees: all of its own up to the last query's, so that the ends of both align.

    q_lengths, k_lengths: of each run; q_limits, k_limits: [runs + 1] int32, where each starts.
    keys: [sum of k_lengths] int64 into the tokens of all ranks, one rank after the other; None where the keys of the
    runs are this rank's tokens as they lie.
    """

    q_lengths: list[int]
    k_lengths: list[int]
    q_limits: Tensor
    k_limits: Tensor
    keys: Tensor | None

    @staticmethod
    def of(limits: list[int], rank: int, size: int, device: torch.device) -> Plan:
        """limits: where each sequence starts, and the end; of all ranks together."""
        lengths = [end - start for start, end in itertools.pairwise(limits) if end > start]
        if size == 1:
            edges = _edges(lengths, device)
            return Plan(lengths, lengths, edges, edges, None)
        total = sum(lengths) // size
        q_lengths, k_lengths, keys, held = [], [], [], 0
        for length in lengths:
            if length % (2 * size):
                raise InvalidField("cu_seqlens", length, f"sequences of a multiple of {2 * size} tokens")
            chunk = length // (2 * size)
            order = [held + r * total + np.arange(chunk) for r in range(size)]
            order += [held + r * total + chunk + np.arange(chunk) for r in reversed(range(size))]
            whole = np.concatenate(order)
            for number in (rank, 2 * size - 1 - rank):
                q_lengths.append(chunk)
                k_lengths.append((number + 1) * chunk)
                keys.append(whole[: k_lengths[-1]])
            held += 2 * chunk
        index = torch.from_numpy(np.concatenate(keys)).to(device)
        return Plan(q_lengths, k_lengths, _edges(q_lengths, device), _edges(k_lengths, device), index)


def _edges(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def _planned(packing: PackedSeqParams, group: dist.ProcessGroup, device: torch.device) -> Plan:
    """The plan of a row, kept on it: reading the limits waits for the device, once a row rather than once a layer."""
    plan = getattr(packing, "slime_plan", None)
    if plan is None:
        padded = packing.cu_seqlens_q_padded
        limits = (padded if padded is not None else packing.cu_seqlens_q).tolist()
        plan = Plan.of(limits, group.rank(), group.size(), device)
        packing.slime_plan = plan  # type: ignore[attr-defined]
    return plan


class _GatherTokens(torch.autograd.Function):
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
        own = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient, group=ctx.group)
        return own, None
