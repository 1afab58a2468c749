"""Causal attention over the runs of a packed row, without a mask over all of its tokens.

    T  queries      K  keys and values, in the order of the row      h, g  heads of queries, of keys and values
    d  width of a head of queries and keys                           v     of values

On CUDA in bfloat16 one call of FlashAttention or cuDNN does the whole row, and a second one where responses share
prompts (shared_attention.py). Elsewhere all runs of one shape are a call of scaled_dot_product_attention, which is slow
on a GPU: the log says so. That part is not compiled: every other length would compile it again. So go the runs of which
each query attends to chosen keys alone (sparse_attention.py), in any type.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.trainer.backends.shared_attention import attend_runs
from slime.trainer.batching.runs import Runs, RunShape
from slime.types.errors import NotAvailable

log = logging.getLogger(__name__)

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # a torch before 2.10
    varlen_attn = None

_FLASH_TAKES = set() if varlen_attn is None else set(inspect.signature(varlen_attn).parameters)
_HAVE_FLASH = {"scale", "window_size"} <= _FLASH_TAKES
_MAX_FLASH_WIDTH = 256
# Keys of a run up to which the CPU's kernel is faster in float32 than in bfloat16: six times at 16, twice at 128.
_SHORT = 256
# Queries at a time that attend to chosen keys, each of which has a place for every key of its run.
_CHOOSING = 1024


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scale: float | None = None,
    window: int | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """[T, h, d], [K, g, d], [K, g, v] -> [T, h, v]. scale: of the logits, d ** -0.5 by default.

    window: keys that a query sees at most, its own among them; None for all of the run up to its own. Raises
    NotAvailable for a window over shared prompts on a GPU, for which keys have to be gathered.

    chosen: [T, k] int32, the keys that a query attends to of those, by their places among all keys of its run; runs of
    up to k keys need no choice.
    """
    if chosen is not None or not flash_takes(query):
        return _by_shape(query, key, value, runs, scale, window, chosen)
    if runs.keys is not None:
        width = key.shape[-1]
        both = torch.cat([key, value], dim=-1)
        # Without a window hundreds of runs may see a key, and the sum of their gradients would not grow in bfloat16.
        wide = both.float() if window is None else both
        key, value = wide.index_select(0, runs.keys).to(both.dtype).split([width, value.shape[-1]], dim=-1)
    return _flash(query, key, value, runs, scale, window)


def flash_takes(query: Tensor) -> bool:
    return (
        _HAVE_FLASH
        and query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= _MAX_FLASH_WIDTH
        and query.shape[-1] % 8 == 0
    )


@cache
def _warn_slow(dtype: torch.dtype, width: int) -> None:
    log.warning(
        "attention goes sample by sample, which is slow: FlashAttention takes bfloat16 and heads of a multiple of 8 up "
        "to %d, with a torch of 2.11 or later; here are %s, %d, and %s",
        _MAX_FLASH_WIDTH, dtype, width, torch.__version__,
    )  # fmt: skip


def _flash(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float | None, window: int | None) -> Tensor:
    width, value_width = query.shape[-1], value.shape[-1]
    if value_width != width:
        # The kernel takes one width for queries, keys and values; the zeros behind the values are cut off again.
        value = F.pad(value, (0, width - value_width))
    if window is not None and runs.shared is not None:
        raise NotAvailable.unavailable("sliding_window over shared prompts", "their keys have to be gathered")
    return attend_runs(query, key, value, runs, scale, window)[..., :value_width]


@torch.compiler.disable
def _by_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scale: float | None,
    window: int | None,
    chosen: Tensor | None = None,
) -> Tensor:
    if query.is_cuda and chosen is None:
        _warn_slow(query.dtype, query.shape[-1])
    dtype, order = query.dtype, runs.by_shape
    if not query.is_cuda and dtype.itemsize < 4 and max((s.keys for s in order.shapes), default=0) <= _SHORT:
        query, key, value = query.float(), key.float(), value.float()
    # Split once: the gradient of a slice is as long as the whole row, and each shape would have its own.
    sizes = [s.runs * s.queries for s in order.shapes]
    queries = _rows(query, order.queries).split(sizes)
    if chosen is not None and order.queries is not None:
        chosen = chosen[order.queries]
    places = [None] * len(sizes) if chosen is None else chosen.split(sizes)
    held = [s.runs * s.keys for s in order.shapes]
    both = zip(_rows(key, order.keys).split(held), _rows(value, order.keys).split(held), strict=True)
    outputs = []
    for shape, q, (k, v), of_shape in zip(order.shapes, queries, both, places, strict=True):
        if of_shape is not None and shape.keys > of_shape.shape[1]:
            outputs.append(_to_chosen(q, k, v, of_shape, shape, scale))
            continue
        mask = _mask(shape.queries, shape.keys, window, q.device)
        output = F.scaled_dot_product_attention(
            q.unflatten(0, (shape.runs, -1)).transpose(1, 2),
            k.unflatten(0, (shape.runs, -1)).transpose(1, 2),
            v.unflatten(0, (shape.runs, -1)).transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return _rows(torch.cat(outputs), order.back).to(dtype)


def _to_chosen(
    query: Tensor, key: Tensor, value: Tensor, chosen: Tensor, shape: RunShape, scale: float | None
) -> Tensor:
    """Attends to the chosen keys of runs of one shape, that lie end to end."""
    outputs, before = [], shape.keys - shape.queries
    for run in range(shape.runs):
        q, places = (each[run * shape.queries :][: shape.queries] for each in (query, chosen))
        k, v = (each[run * shape.keys :][: shape.keys].transpose(0, 1)[None] for each in (key, value))
        for first in range(0, shape.queries, _CHOOSING):
            part = q[first : first + _CHOOSING]
            # Later keys are chosen only where all that may be seen are.
            seen = before + first + len(part)
            mask = torch.zeros(len(part), shape.keys, dtype=torch.bool, device=q.device)
            mask = mask.scatter_(1, places[first : first + _CHOOSING].long(), True).tril_(before + first)[:, :seen]
            output = F.scaled_dot_product_attention(
                part.transpose(0, 1)[None], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale,
                enable_gqa=q.shape[1] != key.shape[1],
            )  # fmt: skip
            outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _rows(tensor: Tensor, index: Tensor | None) -> Tensor:
    """[T, h, d], [n] -> [n, h, d]; None is all in order."""
    if index is None:
        return tensor
    # The gradient of an embedding adds up rows many times faster on a CPU than that of an index. In float32 at least:
    # hundreds of runs may see a key, and the sum of their gradients would not grow in bfloat16.
    wide = tensor if tensor.dtype.itemsize >= 4 else tensor.float()
    return F.embedding(index, wide.flatten(1)).to(tensor.dtype).unflatten(1, tensor.shape[1:])


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[queries, keys] bool, or None where plain causality says the same."""
    if queries == keys and (window is None or window >= keys):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)
