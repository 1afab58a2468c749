"""DeepSeek sparse attention (DSA) over packed rows: an indexer chooses the keys that each query attends to.

    T  queries      K  keys, in the order of the row      H  heads of the indexer      D  their width
    k  keys that are chosen                               r  channels that positions rotate

The score of a key is the sum over H of weight * relu(query . key / sqrt(D)); the k best of its run up to its own are
those that a query attends to. A choice has no gradient, and there is no loss here from which an indexer could learn:
it stays as it is. Source: DeepSeek-V3.2 (2025).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.trainer.backends.attention import attend
from slime.trainer.batching.runs import Runs
from slime.types.errors import NotAvailable

# By model_type in transformers. DeepSeek-V3.2 itself rotates other channels in its indexer.
FAMILIES = frozenset({"glm_moe_dsa"})
_LAYER, _INDEXER = "MoeDsaAttention", "MoeDsaIndexer"
# Scores at a time, in numbers.
_AT_ONCE = 1 << 26


def has_indexer(model: Any) -> bool:
    """Tells whether layers of the model choose keys."""
    return any(type(module).__name__.endswith(_INDEXER) for module in model.modules())


def use_packed_sparse_attention(model: Any) -> None:
    """Makes the layers of a model of FAMILIES take `runs`, and freezes their indexers."""
    for module in model.modules():
        if type(module).__name__.endswith(_LAYER):
            module.forward = functools.partial(packed_sparse_attention, module)
        elif type(module).__name__.endswith(_INDEXER):
            module.requires_grad_(False)


def packed_sparse_attention(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    prev_topk_indices: Tensor | None = None,
    runs: Runs | None = None,
    **others: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """[1, T, hidden] -> [1, T, hidden] and the chosen keys, which the next layer may take in place of its own.

    layer: an attention of transformers. Raises NotAvailable without `runs`.
    """
    if runs is None:
        reason = f"{type(layer).__name__} is not told where samples begin"
        raise NotAvailable.unavailable("packed rows of this model", reason).at("--hf-checkpoint")
    hidden, (cos, sin) = hidden_states[0], (each[0, :, None] for each in position_embeddings)
    rotated = layer.qk_rope_head_dim

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x.split([rotated, x.shape[-1] - rotated], dim=-1)
        return torch.cat([_turned(turned, cos, sin), rest], dim=-1)

    latent = layer.q_a_layernorm(layer.q_a_proj(hidden))
    query = layer.q_b_proj(latent).unflatten(-1, (layer.num_heads, -1))
    content, turned = query.split([layer.qk_nope_head_dim, rotated], dim=-1)
    query = torch.cat([content, _turned(turned, cos, sin)], dim=-1)
    compressed, turned = layer.kv_a_proj_with_mqa(hidden).split([layer.kv_lora_rank, rotated], dim=-1)
    both = layer.kv_b_proj(layer.kv_a_layernorm(compressed)).unflatten(-1, (layer.num_heads, -1))
    content, value = both.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=-1)
    shared = _turned(turned[:, None], cos, sin).expand(-1, layer.num_heads, -1)
    key = torch.cat([content, shared], dim=-1)
    chosen = prev_topk_indices
    if layer.indexer is not None:
        inputs = indexer_inputs(layer.indexer, hidden.detach(), latent.detach(), rotate)
        chosen = choose(*inputs, runs, layer.indexer.index_topk)
    # Rotary embeddings may be float32 beside bfloat16 weights.
    output = attend(query.to(value.dtype), key.to(value.dtype), value, runs, layer.scaling, chosen=chosen)
    return layer.o_proj(output.flatten(1))[None], None, chosen


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, h, r], [T, 1, r], [T, 1, r] -> [T, h, r]: pairs that lie side by side are turned, and come out as halves."""
    half = x.shape[-1] // 2
    cos, sin, first, second = cos[..., :half], sin[..., :half], x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def indexer_inputs(
    indexer: Any, hidden: Tensor, latent: Tensor, rotate: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [T, H, D], keys [T, D] and weights [T, H] of hidden states [T, hidden] and compressed queries.

    indexer: has the modules wq_b, wk, k_norm and weights_proj. rotate: [T, h, D] -> [T, h, D], by positions.
    """
    project: nn.Linear = indexer.weights_proj
    heads, wide = project.weight.shape[0], torch.promote_types(hidden.dtype, torch.float32)
    query = rotate(indexer.wq_b(latent).unflatten(-1, (heads, -1)))
    key = rotate(indexer.k_norm(indexer.wk(hidden))[:, None])[:, 0]
    return query, key, F.linear(hidden.to(wide), project.weight.to(wide)) * heads**-0.5


@torch.no_grad()
@torch.compiler.disable
def choose(query: Tensor, key: Tensor, weights: Tensor, runs: Runs, count: int) -> Tensor | None:
    """[T, H, D], [K, D], [T, H] -> [T, k] int32, for `attend`: the places of keys among all that the query's run sees.

    The places of a query with fewer keys than `count` are without meaning. None: no run has more keys than `count`.
    """
    order = runs.by_shape
    if all(shape.keys <= count for shape in order.shapes):
        return None
    wide = torch.promote_types(query.dtype, torch.float32)
    if order.queries is not None:
        query, weights = query[order.queries], weights[order.queries]
    if order.keys is not None:
        key = key[order.keys]
    query, key, weights = query.to(wide) * query.shape[-1] ** -0.5, key.to(wide), weights.to(wide)
    found = torch.zeros(len(query), count, dtype=torch.int32, device=query.device)
    start = k_start = 0
    for shape in order.shapes:
        for _ in range(shape.runs):
            end, k_end = start + shape.queries, k_start + shape.keys
            if shape.keys > count:
                found[start:end] = _best(query[start:end], key[k_start:k_end], weights[start:end], count)
            start, k_start = end, k_end
    return found if order.back is None else found[order.back]


def _best(query: Tensor, key: Tensor, weights: Tensor, count: int) -> Tensor:
    """[n, H, D], [m, D], [n, H] -> [n, k], of one run, whose last query has the last key."""
    before, rows = len(key) - len(query), max(1, _AT_ONCE // (query.shape[1] * len(key)))
    found = []
    for first in range(0, len(query), rows):
        part = slice(first, first + rows)
        scores = torch.einsum("qhk,qh->qk", (query[part] @ key.t()).relu_(), weights[part])
        own = before + torch.arange(len(query), device=query.device)[part]
        later = torch.arange(len(key), device=query.device) > own[:, None]
        found.append(scores.masked_fill_(later, float("-inf")).topk(count, dim=-1).indices)
    return torch.cat(found).to(torch.int32)
