"""Qwen2 and Qwen2.5 (biases of queries, keys and values), Qwen3 (norms of queries and keys), Qwen3 with experts, and
Qwen3-VL, whose language model is a Qwen3.

A Qwen3-VL's `text_config` describes the language model, and `vision_config` what reads images, which is not cut over
ranks: its parameters keep their names and shapes behind `visual.tower`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family, ignored_always
from slime.converters.families.config_json import head_dim, moe_layers, refuse, required, text_of
from slime.converters.families.mapping import Parameter, copy

# Defaults of transformers' Qwen3Config, Qwen3MoeConfig and Qwen3VLTextConfig.
QWEN3_HEAD_DIM = {"qwen3": 128, "qwen3_moe": None, "qwen3_vl_text": 128}


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


def _qwen3_vl_arguments(config: Config) -> dict[str, Any]:
    return _qwen3_arguments(_text(config))


def _text(config: Config) -> Config:
    required(config, "text_config")
    return {"model_type": "qwen3_vl_text", **text_of(config)}


def _qwen3_vl_parameters(config: Config) -> Iterator[Parameter]:
    yield from map(blocks.behind_images, _qwen3_parameters(_text(config)))
    vision = required(config, "vision_config")
    yield from vision_tower(vision, len(required(vision, "deepstack_visual_indexes")))


def vision_tower(vision: Config, fed: int = 0) -> Iterator[Parameter]:
    """Yields the parameters that read images. vision: `vision_config`; fed: layers of the language model that get
    features of images beside its embedding."""
    for name, shape in _vision_shapes(vision, fed):
        yield copy(f"visual.tower.{name}", f"model.visual.{name}", shape)


def _vision_shapes(vision: Config, fed: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, patch = (required(vision, name) for name in ("hidden_size", "intermediate_size", "patch_size"))
    channels, frames = vision.get("in_channels", 3), vision.get("temporal_patch_size", 2)
    merged = hidden * vision.get("spatial_merge_size", 2) ** 2
    yield from _affine("patch_embed.proj", hidden, channels, frames, patch, patch)
    yield "pos_embed.weight", (required(vision, "num_position_embeddings"), hidden)
    for number in range(required(vision, "depth")):
        block = f"blocks.{number}"
        yield from _affine(f"{block}.norm1", hidden)
        yield from _affine(f"{block}.norm2", hidden)
        yield from _affine(f"{block}.attn.qkv", 3 * hidden, hidden)
        yield from _affine(f"{block}.attn.proj", hidden, hidden)
        yield from _affine(f"{block}.mlp.linear_fc1", ffn, hidden)
        yield from _affine(f"{block}.mlp.linear_fc2", hidden, ffn)
    for name, width in [("merger", hidden), *((f"deepstack_merger_list.{i}", merged) for i in range(fed))]:
        yield from _affine(f"{name}.norm", width)
        yield from _affine(f"{name}.linear_fc1", merged, merged)
        yield from _affine(f"{name}.linear_fc2", required(vision, "out_hidden_size"), merged)


def _affine(name: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]


def _qwen3_vl_ignored(config: Config) -> tuple[str, ...]:
    return ignored_always(_text(config))


QWEN2 = Family("Qwen2", ("qwen2",), _qwen2_arguments, _qwen2_parameters)
QWEN3 = Family("Qwen3", ("qwen3",), _qwen3_arguments, _qwen3_parameters)
QWEN3_MOE = Family("Qwen3-MoE", ("qwen3_moe",), _qwen3_moe_arguments, _qwen3_moe_parameters)
QWEN3_VL = Family("Qwen3-VL", ("qwen3_vl",), _qwen3_vl_arguments, _qwen3_vl_parameters, _qwen3_vl_ignored)
