"""Gated delta nets of transformers (Qwen3-Next, Qwen3.5) over packed rows: state and convolution begin with each run.

transformers' own code keeps the sequences of a row apart only with kernels for GPUs (flash-linear-attention,
causal-conv1d), and warns or raises without them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slime.trainer.backends.delta_rule import causal_convolution, gated_delta_rule
from slime.trainer.batching.runs import Runs
from slime.types.errors import NotAvailable

# By model_type of the text model. Their attention layers call transformers' attention functions, too.
FAMILIES = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_LAYER = "GatedDeltaNet"


def has_state(model: Any) -> bool:
    """Tells whether layers of the model have a recurrent state."""
    return any(_is_delta_net(module) for module in model.modules())


def use_packed_delta_nets(model: Any) -> None:
    """Makes the delta nets of a model of FAMILIES take `runs`; a model without any stays as it is."""
    for module in model.modules():
        if _is_delta_net(module):
            module.forward = functools.partial(packed_delta_net, module)
            # Its layers do call them, but transformers does not say so.
            model._supports_attention_backend = True


def _is_delta_net(module: nn.Module) -> bool:
    return type(module).__name__.endswith(_LAYER)


def packed_delta_net(layer: Any, hidden_states: Tensor, runs: Runs | None = None, **others: Any) -> Tensor:
    """[1, T, hidden] -> [1, T, hidden]. layer: a delta net of transformers. Raises NotAvailable without `runs`."""
    if runs is None:
        reason = f"{type(layer).__name__} is not told where samples begin"
        raise NotAvailable.unavailable("packed rows of this model", reason).at("--hf-checkpoint")
    mixed, gate, b, a = _projected(layer, hidden_states[0])
    mixed = causal_convolution(mixed, layer.conv1d.weight.squeeze(1), runs)
    query, key, value = F.silu(mixed).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    output = gated_delta_rule(
        query.unflatten(-1, (-1, layer.head_k_dim)),
        key.unflatten(-1, (-1, layer.head_k_dim)),
        value.unflatten(-1, (-1, layer.head_v_dim)),
        -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias),
        b.sigmoid(),
        runs,
    )
    normed = layer.norm(output.reshape(-1, layer.head_v_dim), gate.reshape(-1, layer.head_v_dim))
    projected: Tensor = layer.out_proj(normed.reshape(len(output), -1))
    return projected[None]


def _projected(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, hidden] -> queries, keys and values in one [T, channels], the gate [T, h * v], b and a, each [T, h]."""
    if not hasattr(layer, "in_proj_qkvz"):
        return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden)
    by_head = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden)[None], layer.in_proj_ba(hidden)[None])
    query, key, value, gate, b, a = (tensor[0].flatten(1) for tensor in by_head)
    return torch.cat([query, key, value], dim=-1), gate, b, a
