"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1), dense, and GLM-4.5, 4.6 and 4.7 with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family
from slime.converters.families.config_json import head_dim, moe_layers, num_mtp_layers, required
from slime.converters.families.mapping import Parameter, copy
from slime.converters.families.mtp import mtp_parameters, shared_copies

# Defaults of transformers' Glm4Config.
GLM4_HEAD_DIM = 128
GLM4_NORM_EPSILON = 1.5625e-07
# Default share of a head's channels that rotary positions rotate.
ROTATED = 0.5


def _glm4_arguments(config: Config) -> dict[str, Any]:
    args = arguments.decoder({"rms_norm_eps": GLM4_NORM_EPSILON, **config})
    args |= arguments.attention(config, GLM4_HEAD_DIM, ROTATED)
    args |= {"rotary_interleaved": True, "post_self_attn_layernorm": True, "post_mlp_layernorm": True}
    return args | ({"add_qkv_bias": True} if config.get("attention_bias", True) else {})


def _glm4_parameters(config: Config) -> Iterator[Parameter]:
    return blocks.decoder(config, lambda _: _glm4_layer(config))


def _glm4_layer(config: Config) -> Iterator[Parameter]:
    """Yields norms before and after both the attention and the MLP; gate and up are one tensor already."""
    hidden, ffn = required(config, "hidden_size"), required(config, "intermediate_size")
    yield from blocks.layer_norms(hidden)
    yield from blocks.attention(config, head_dim(config, GLM4_HEAD_DIM), bias=config.get("attention_bias", True))
    yield blocks.norm("post_self_attn_layernorm", "post_self_attn_layernorm", hidden)
    yield copy("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", (2 * ffn, hidden), split=0, stacks=2)
    yield copy("mlp.linear_fc2.weight", "mlp.down_proj.weight", (hidden, ffn), split=1)
    yield blocks.norm("post_mlp_layernorm", "post_mlp_layernorm", hidden)


def _glm4_moe_arguments(config: Config) -> dict[str, Any]:
    args = arguments.decoder(config) | arguments.attention(config, rotated=ROTATED) | arguments.ahead(config)
    args |= arguments.experts(config, required(config, "n_routed_experts")) | arguments.sigmoid_router(config)
    if config.get("attention_bias", False):
        args["add_qkv_bias"] = True
    if config.get("use_qk_norm", False):
        args["qk_layernorm"] = True
    return args


def _glm4_moe_parameters(config: Config) -> Iterator[Parameter]:
    count = required(config, "num_hidden_layers")
    kinds = moe_layers(config, count + num_mtp_layers(config))
    yield from blocks.decoder(config, lambda number: _glm4_moe_layer(config, kinds[number]))
    yield from mtp_parameters(config, lambda number: _glm4_moe_layer(config, kinds[number]))


def _glm4_moe_layer(config: Config, has_experts: int) -> Iterator[Parameter]:
    yield from blocks.layer_norms(required(config, "hidden_size"))
    bias, norms = config.get("attention_bias", False), config.get("use_qk_norm", False)
    yield from blocks.attention(config, head_dim(config), bias=bias, norms=norms)
    if has_experts:
        count, shared = required(config, "n_routed_experts"), config.get("n_shared_experts") or 0
        yield from blocks.moe(config, count, bias=True, shared=shared)
    else:
        yield from blocks.dense_mlp(config)


GLM4 = Family("GLM-4", ("glm4",), _glm4_arguments, _glm4_parameters)
GLM4_MOE = Family("GLM-4.5", ("glm4_moe",), _glm4_moe_arguments, _glm4_moe_parameters, shared_copies)
