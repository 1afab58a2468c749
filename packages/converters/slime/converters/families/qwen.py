"""Qwen2 and Qwen2.5 (biases of queries, keys and values), Qwen3 (norms of queries and keys), Qwen3 with experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family
from slime.converters.families.config_json import head_dim, moe_layers, refuse, required
from slime.converters.families.mapping import Parameter

# Defaults of transformers' Qwen3Config and Qwen3MoeConfig.
QWEN3_HEAD_DIM = {"qwen3": 128, "qwen3_moe": None}


def _qwen2_arguments(config: Config) -> dict[str, Any]:
    return arguments.decoder(config) | arguments.attention(config) | {"add_qkv_bias": True}


def _qwen2_parameters(config: Config) -> Iterator[Parameter]:
    return blocks.decoder(config, lambda _: qwen2_layer(config))


def qwen2_layer(config: Config) -> Iterator[Parameter]:
    yield from blocks.layer_norms(required(config, "hidden_size"))
    yield from blocks.attention(config, head_dim(config), bias=True)
    yield from blocks.dense_mlp(config)


def _channels(config: Config) -> int:
    return head_dim(config, QWEN3_HEAD_DIM[config["model_type"]])


def _qwen3_arguments(config: Config) -> dict[str, Any]:
    refuse(config, "attention_bias", False, "Megatron cannot have a bias on the attention's output only")
    return arguments.decoder(config) | arguments.attention(config, _channels(config)) | {"qk_layernorm": True}


def _qwen3_parameters(config: Config) -> Iterator[Parameter]:
    return blocks.decoder(config, lambda _: _qwen3_layer(config))


def _qwen3_layer(config: Config, has_experts: int = 0) -> Iterator[Parameter]:
    yield from blocks.layer_norms(required(config, "hidden_size"))
    yield from blocks.attention(config, _channels(config), norms=True)
    yield from blocks.moe(config, _num_experts(config)) if has_experts else blocks.dense_mlp(config)


def _qwen3_moe_arguments(config: Config) -> dict[str, Any]:
    args = _qwen3_arguments(config) | arguments.experts(config, _num_experts(config))
    if not config.get("norm_topk_prob", False):
        args["moe_router_pre_softmax"] = True
    return args


def _qwen3_moe_parameters(config: Config) -> Iterator[Parameter]:
    kinds = moe_layers(config, required(config, "num_hidden_layers"))
    return blocks.decoder(config, lambda number: _qwen3_layer(config, kinds[number]))


def _num_experts(config: Config) -> int:
    return int(config.get("num_experts") or required(config, "num_local_experts"))


QWEN2 = Family("Qwen2", ("qwen2",), _qwen2_arguments, _qwen2_parameters)
QWEN3 = Family("Qwen3", ("qwen3",), _qwen3_arguments, _qwen3_parameters)
QWEN3_MOE = Family("Qwen3-MoE", ("qwen3_moe",), _qwen3_moe_arguments, _qwen3_moe_parameters)
