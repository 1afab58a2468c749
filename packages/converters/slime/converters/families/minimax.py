"""MiniMax-M2, M2.1 and M2.5: norms over all heads together, and experts in every layer without shared ones.

Its config.json calls the inner size of an expert `intermediate_size`, and its files have Mixtral's names of experts.
`num_mtp_modules` describes layers that are not published.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family
from slime.converters.families.config_json import head_dim, query_groups, refuse, required
from slime.converters.families.mapping import Parameter, copy, stack
from slime.types.errors import NotAvailable

# Defaults of transformers' MiniMaxM2Config.
DEFAULTS: dict[str, Any] = {"head_dim": 128, "rope_theta": 5000000.0}


def _arguments(config: Config) -> dict[str, Any]:
    config = _completed(config)
    refuse(config, "use_qk_norm", True, "the family has norms of queries and keys")
    refuse(config, "qk_norm_type", "per_layer", "the family's norms are over all heads together")
    refuse(config, "use_routing_bias", True, "the family chooses experts with a bias")
    refuse(config, "shared_intermediate_size", 0, "the family has no shared experts")
    refuse(config, "routed_scaling_factor", 1.0, "the family does not scale its experts")
    refuse(config, "attn_type_list", [1] * required(config, "num_hidden_layers"), "every layer has full attention")
    if required(config, "num_experts_per_tok") == 1:
        reason = "Megatron does not make the score of a single expert 1"
        raise NotAvailable.unavailable("num_experts_per_tok 1", reason).at("config.json")
    rotated = config.get("rotary_dim")
    args = arguments.decoder(config)
    args |= arguments.attention(config, rotated=1.0 if rotated is None else rotated / head_dim(config))
    args |= {"qk_layernorm": True, "qk_layernorm_across_heads": True}
    return args | arguments.experts(config, required(config, "num_local_experts")) | arguments.sigmoid_router(config)


def _completed(config: Config) -> dict[str, Any]:
    """Returns the config with defaults, and the size of experts under the key that other families have for it."""
    known = {**DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
    return {**known, "moe_intermediate_size": required(config, "intermediate_size")}


def _parameters(config: Config) -> Iterator[Parameter]:
    completed = _completed(config)
    return blocks.decoder(completed, lambda _: _layer(completed))


def _layer(config: Config) -> Iterator[Parameter]:
    hidden, width = required(config, "hidden_size"), head_dim(config)
    yield from blocks.layer_norms(hidden)
    yield from blocks.attention(config, width)
    heads = {"q": required(config, "num_attention_heads"), "k": query_groups(config)}
    for name, count in heads.items():
        yield blocks.norm(f"self_attention.{name}_layernorm", f"self_attn.{name}_norm", count * width)
    experts, ffn = required(config, "num_local_experts"), required(config, "moe_intermediate_size")
    yield copy("mlp.router.weight", "block_sparse_moe.gate.weight", (experts, hidden))
    yield copy("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", (experts,))
    for number in range(experts):
        name, hf_name = f"mlp.experts.local_experts.{number}", f"block_sparse_moe.experts.{number}"
        gate, up, down = (f"{hf_name}.{part}.weight" for part in ("w1", "w3", "w2"))
        yield stack(f"{name}.linear_fc1.weight", (gate, up), (ffn, hidden))
        yield copy(f"{name}.linear_fc2.weight", down, (hidden, ffn), split=1)


MINIMAX_M2 = Family("MiniMax-M2", ("minimax_m2",), _arguments, _parameters)
