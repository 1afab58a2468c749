"""Attention over packed rows as an attention function of transformers, which its models call in every layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from slime.trainer.backends.attention import attend
from slime.trainer.batching.runs import Runs
from slime.types.errors import NotAvailable

_NAME = "slime_packed"
# Arguments of attention functions that change the result, which only a few models pass and which are not supported.
_UNKNOWN = ("softcap", "s_aux", "position_bias")


def use_packed_attention(decoder: Any, *, flag: str) -> None:
    """Makes the decoder's layers call `packed_attention`; its forward takes `runs`, and makes no mask.

    Raises NotAvailable, naming `flag`, for a model that calls no attention functions.
    """
    AttentionInterface.register(_NAME, packed_attention)
    if not decoder._supports_attention_backend:
        reason = f"{type(decoder).__name__} does not call transformers' attention functions"
        raise NotAvailable.unavailable("packed rows of this model", reason).at(flag)
    decoder.set_attn_implementation(_NAME)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    runs: Runs | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, h, T, d], key [1, g, T, d], value [1, g, T, v] -> [1, T, h, v].

    sliding_window: tokens that a query sees at most, its own among them. Raises NotAvailable where the model does not
    hand on `runs`, or wants more than causal attention.
    """
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if runs is None or unknown:
        what = "does not tell its layers which tokens see which" if runs is None else f"has attention with {unknown[0]}"
        reason = f"{type(module).__name__} {what}"
        raise NotAvailable.unavailable("packed rows of this model", reason).at("--hf-checkpoint")
    # Read so that torch guards on it: code compiled for any length must not run for the length with its own kernels.
    bool(runs.one_length)
    q, k, v = (tensor.transpose(1, 2)[0] for tensor in (query, key, value))
    # Some models have float32 rotary embeddings beside bfloat16 weights.
    q, k = q.to(v.dtype), k.to(v.dtype)
    return attend(q, k, v, runs, scaling, sliding_window)[None], None
