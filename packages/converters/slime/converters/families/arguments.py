"""Megatron's arguments that families share; those that keep Megatron's default are left out."""

from __future__ import annotations

from typing import Any

from slime.converters.families.base import Config
from slime.converters.families.config_json import (
    head_dim,
    moe_layers,
    num_mtp_layers,
    query_groups,
    refuse,
    required,
    rope,
    rotary_base,
    tied,
    whole,
)
from slime.types.errors import NotAvailable

# Constants of Llama 3's rotary scaling in Megatron's code, which no argument changes.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# The score of a group is the sum over this many of its best experts; Megatron takes topk // chosen groups of them.
BEST_OF_GROUP = 2


def decoder(config: Config) -> dict[str, Any]:
    """Returns sizes, norms and activation, which every family has."""
    refuse(config, "hidden_act", "silu", "its MLP is gated by silu")
    refuse(config, "use_sliding_window", False, "attention is full here")
    args: dict[str, Any] = {
        "num_layers": required(config, "num_hidden_layers"),
        "hidden_size": required(config, "hidden_size"),
        "ffn_hidden_size": required(config, "intermediate_size"),
        "num_attention_heads": required(config, "num_attention_heads"),
        "vocab_size": required(config, "vocab_size"),
        "max_position_embeddings": required(config, "max_position_embeddings"),
        "normalization": "RMSNorm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "swiglu": True,
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": rotary_base(config),
    }
    if not tied(config):
        args["untie_embeddings_and_output_weights"] = True
    return args


def ahead(config: Config) -> dict[str, Any]:
    """Returns the arguments of families with layers for multi-token prediction."""
    return {"mtp_num_layers": num_mtp_layers(config)} if num_mtp_layers(config) else {}


def attention(config: Config, channels: int | None = None, rotated: float = 1.0) -> dict[str, Any]:
    """Returns the arguments of grouped-query attention.

    channels: a head's, where the family has a default of its own; rotated: the part of them that positions rotate.
    """
    args: dict[str, Any] = {"kv_channels": head_dim(config, channels), **_rope_scaling(config)}
    rotated = rope(config).get("partial_rotary_factor", rotated)
    if rotated != 1.0:
        args["rotary_percent"] = rotated
    if query_groups(config) != config["num_attention_heads"]:
        args |= {"group_query_attention": True, "num_query_groups": query_groups(config)}
    return args


def _rope_scaling(config: Config) -> dict[str, Any]:
    values = rope(config)
    kind = values["rope_type"]
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": whole(values["factor"])}
    if kind == "llama3":
        for key, value in LLAMA3.items():
            refuse(values, key, value, "Megatron scales as Llama 3 does")
        return {"use_rope_scaling": True, "rope_scaling_factor": values["factor"]}
    reason = f"models of type {config['model_type']} have default, linear or llama3 here"
    raise NotAvailable.unavailable(f"rope_type {kind!r}", reason).at("config.json")


def experts(config: Config, count: int) -> dict[str, Any]:
    """Returns the arguments that every mixture of experts has."""
    layers = moe_layers(config, config["num_hidden_layers"])
    args = {
        "num_experts": count,
        "moe_ffn_hidden_size": required(config, "moe_intermediate_size"),
        "moe_router_topk": required(config, "num_experts_per_tok"),
        "moe_router_dtype": "fp32",
    }
    return args if all(layers) else {**args, "moe_layer_freq": layers}


def sigmoid_router(config: Config) -> dict[str, Any]:
    """Returns DeepSeek V3's router arguments: sigmoid scores, a bias that chooses experts by group, shared experts."""
    refuse(config, "scoring_func", "sigmoid", "the family scores experts by sigmoid")
    refuse(config, "topk_method", "noaux_tc", "the family chooses experts with a bias")
    refuse(
        config, "norm_topk_prob", config.get("num_experts_per_tok", 1) > 1, "Megatron makes scores of several sum to 1"
    )
    args: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # Trainer and engines must choose the same experts, so the bias stays fixed.
        "moe_router_bias_update_rate": 0.0,
    }
    if config.get("routed_scaling_factor", 1.0) != 1.0:
        args["moe_router_topk_scaling_factor"] = config["routed_scaling_factor"]
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    if groups > chosen:
        each = config["num_experts_per_tok"] // chosen
        if each != BEST_OF_GROUP:
            reason = (
                f"the family scores a group of experts by its best {BEST_OF_GROUP}, Megatron by "
                f"num_experts_per_tok // topk_group = {config['num_experts_per_tok']} // {chosen} = {each}"
            )
            raise NotAvailable.unavailable(f"topk_group {chosen}", reason).at("config.json")
        args |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    shared = config.get("n_shared_experts") or 0
    if shared:
        args["moe_shared_expert_intermediate_size"] = shared * required(config, "moe_intermediate_size")
    return args
