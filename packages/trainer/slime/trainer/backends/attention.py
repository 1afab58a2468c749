"""Causal attention over the runs of a packed row, without a mask over all of its tokens.

    T  queries      K  keys and values, in the order of the row      h, g  heads of queries, of keys and values
    d  width of a head of queries and keys                           v     of values

On CUDA in bfloat16 one call of FlashAttention does the whole row, and a second one where responses share prompts
(shared_attention.py). Elsewhere each run is a call of scaled_dot_product_attention, which is slow on a GPU: the log
says so. That part is not compiled: every other length would compile it again.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.trainer.backends.shared_attention import attend_runs
from slime.trainer.batching.runs import Runs
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


def attend(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float | None = None, window: int | None = None
) -> Tensor:
    """[T, h, d], [K, g, d], [K, g, v] -> [T, h, v]. scale: of the logits, d ** -0.5 by default.

    window: keys that a query sees at most, its own among them; None for all of the run up to its own. Raises
    NotAvailable for a window over shared prompts on a GPU, for which keys have to be gathered.
    """
    if runs.keys is not None:
        width = key.shape[-1]
        both = torch.cat([key, value], dim=-1).index_select(0, runs.keys)
        key, value = both.split([width, value.shape[-1]], dim=-1)
    if flash_takes(query):
        return _flash(query, key, value, runs, scale, window)
    return _by_run(query, key, value, runs, scale, window)


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
def _by_run(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float | None, window: int | None) -> Tensor:
    if query.is_cuda:
        _warn_slow(query.dtype, query.shape[-1])
    dtype, prompts = query.dtype, runs.prompts()
    q_lengths = runs.q_lengths or runs.q_limits.diff().tolist()
    k_lengths = runs.k_lengths or runs.k_limits.diff().tolist()
    longest = max((len(prompt) + length for prompt, length in zip(prompts, k_lengths, strict=True)), default=0)
    if not query.is_cuda and dtype.itemsize < 4 and longest <= _SHORT:
        query, key, value = query.float(), key.float(), value.float()
    queries, keys, values = query.split(q_lengths), key.split(k_lengths), value.split(k_lengths)
    # Split once: the gradient of a slice is as long as the whole row, and each response would have its own.
    starting = dict(zip(itertools.accumulate(k_lengths, initial=0), zip(keys, values, strict=True), strict=False))
    outputs = []
    for q, k, v, prompt in zip(queries, keys, values, prompts, strict=True):
        if not len(q):
            continue
        if prompt:
            prompt_k, prompt_v = starting[prompt.start]
            k, v = torch.cat([prompt_k, k]), torch.cat([prompt_v, v])
        mask = _mask(len(q), len(k), window, q.device)
        output = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs).to(dtype)


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[queries, keys] bool, or None where plain causality says the same."""
    if queries == keys and (window is None or window >= keys):
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)
