"""Qwen3-Next and Qwen3.5: gated delta nets in most layers, attention with a gate in the others, norms around 0.

A published Qwen3.5 reads images: its language model is described by `text_config`, and its tensors begin with
`model.language_model`. What reads images is part of the model only in a config that `with_vision` returned, and of a
dense one; elsewhere, and layers that predict further tokens (`mtp`) everywhere, are not trained.
The delta nets keep Qwen3.5's names and layouts behind `self_attention.linear_attn`, and are not cut over ranks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family, ignored_always
from slime.converters.families.config_json import head_dim, moe_layers, query_groups, refuse, required, text_of
from slime.converters.families.mapping import Block, Parameter, copy
from slime.converters.families.qwen import vision_tower

# Defaults of transformers' Qwen3NextConfig, which Qwen3.5 has, too.
HEAD_DIM = 256
ROTATED = 0.25
INTERVAL = 4
_HF_VISUAL = "model.visual."
_PREDICTING = r"mtp\..*"
UNTRAINED = (r"model\.visual\..*", _PREDICTING)
_LINEAR = "self_attention.linear_attn."
_DELTA = ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")
# Set in the config of a model whose part that reads images is trained or converted: no model has this key.
_VISION = "slime_vision"
# Set in the config of a model whose files have the experts of a layer in one tensor: no model has this key.
_EXPERTS_TOGETHER = "slime_experts_together"


def with_layout(config: Config, tensors: Iterable[str]) -> dict[str, Any]:
    """Returns `config`, and whether `tensors`, the names in its checkpoint, hold the experts of a layer together."""
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors):
        return {**config, _EXPERTS_TOGETHER: True}
    return dict(config)


def with_vision(config: Config) -> dict[str, Any]:
    """Returns `config` with what reads images as a part of the model, if that is a dense Qwen3.5 that has it."""
    vision = config.get("vision_config")
    if config.get("model_type") != "qwen3_5" or vision is None:
        return dict(config)
    refuse(vision, "deepstack_visual_indexes", [], "layers of a Qwen3.5 see images by its embedding alone")
    return {**config, _VISION: True}


def with_vision_of(config: Config, tensors: Iterable[str]) -> dict[str, Any]:
    """Returns `with_vision(config)` if `tensors`, the names in its checkpoint, are those of all that it describes."""
    whole = with_vision(config)
    # An empty object describes nothing; such files keep what they have as it is.
    if not (whole.get(_VISION) and "depth" in config["vision_config"]):
        return dict(config)
    held = {name for name in tensors if name.startswith(_HF_VISUAL)}
    described = {block.name for parameter in vision_tower(config["vision_config"]) for block in parameter.blocks}
    return whole if described <= held else dict(config)


def delta_nets(text: Config) -> list[int]:
    """Returns 1 for each layer of a model of these families with a delta net, 0 for each with attention."""
    count = required(text, "num_hidden_layers")
    declared = text.get("layer_types")
    if declared:
        return [int(kind == "linear_attention") for kind in declared]
    interval = text.get("full_attention_interval") or INTERVAL
    return [int((number + 1) % interval > 0) for number in range(count)]


def _arguments(config: Config) -> dict[str, Any]:
    text = text_of(config)
    refuse(text, "attention_bias", False, "Megatron cannot have a bias on the attention's output only")
    experts = _num_experts(text)
    # A model of experts alone may leave the size of a dense MLP out.
    sized = {"intermediate_size": text["moe_intermediate_size"], **text} if experts else text
    args = arguments.decoder(sized) | arguments.attention(text, HEAD_DIM, ROTATED)
    args |= {"qk_layernorm": True, "apply_layernorm_1p": True, "attention_output_gate": True}
    args |= {"linear_attention_freq": _frequency(delta_nets(text)), **{name: required(text, name) for name in _DELTA}}
    args["linear_conv_kernel_dim"] = required(text, "linear_conv_kernel_dim")
    if not experts:
        return args
    args |= arguments.experts(text, experts)
    args["moe_shared_expert_intermediate_size"] = required(text, "shared_expert_intermediate_size")
    args["moe_shared_expert_gate"] = True
    # Qwen3.5 has no such key, and its scores of several experts always sum to 1.
    if not text.get("norm_topk_prob", True):
        args["moe_router_pre_softmax"] = True
    return args


def _frequency(kinds: list[int]) -> int | list[int]:
    """Returns N where every N-th layer has attention, as Megatron writes it, or the list."""
    interval = kinds.index(0) + 1 if 0 in kinds else 0
    regular = interval > 1 and kinds == [int((number + 1) % interval > 0) for number in range(len(kinds))]
    return interval if regular else kinds


def _num_experts(text: Config) -> int:
    return int(text.get("num_experts") or 0)


def _parameters(config: Config) -> Iterator[Parameter]:
    text = text_of(config)
    kinds = delta_nets(text)
    experts = moe_layers(text, len(kinds)) if _num_experts(text) else [0] * len(kinds)
    together = bool(config.get(_EXPERTS_TOGETHER))
    for parameter in blocks.decoder(text, lambda number: _layer(text, kinds[number], experts[number], together)):
        yield parameter if text is config else blocks.behind_images(parameter)
    if config.get(_VISION):
        yield from vision_tower(required(config, "vision_config"))


def _layer(text: Config, is_linear: int, has_experts: int, together: bool) -> Iterator[Parameter]:
    yield from blocks.layer_norms(required(text, "hidden_size"))
    yield from _delta_net(text) if is_linear else _attention(text)
    if not has_experts:
        yield from blocks.dense_mlp(text)
        return
    hidden = required(text, "hidden_size")
    for parameter in blocks.moe(text, _num_experts(text)):
        yield _in_one_tensor(parameter, _num_experts(text)) if together and parameter.is_expert else parameter
    shared = required(text, "shared_expert_intermediate_size")
    yield from blocks.gated_mlp("mlp.shared_experts", "mlp.shared_expert", hidden, shared)
    yield copy("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", (1, hidden))


def _in_one_tensor(parameter: Parameter, experts: int) -> Parameter:
    """Returns an expert's parameter as a part of the tensor that holds gate and up, or down, of all of them."""
    number = int(parameter.name.split(".local_experts.")[1].split(".")[0])
    name = "gate_up_proj" if ".linear_fc1." in parameter.name else "down_proj"
    shape, zero = parameter.shape, (0, 0)
    block = Block(f"mlp.experts.{name}", (experts, *shape), zero, zero, shape, (number,))
    return dataclasses.replace(parameter, blocks=(block,))


def _delta_net(text: Config) -> Iterator[Parameter]:
    hidden = required(text, "hidden_size")
    key_dim, value_dim, key_heads, value_heads = (required(text, name) for name in _DELTA)
    keys, values = key_dim * key_heads, value_dim * value_heads
    shapes: dict[str, tuple[int, ...]] = {
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "conv1d.weight": (2 * keys + values, 1, required(text, "linear_conv_kernel_dim")),
        "norm.weight": (value_dim,),
        "out_proj.weight": (hidden, values),
    }
    if text["model_type"] == "qwen3_next":
        yield from _by_key_head(text)
    else:
        projections = {"qkv": 2 * keys + values, "z": values, "b": value_heads, "a": value_heads}
        shapes |= {f"in_proj_{name}.weight": (rows, hidden) for name, rows in projections.items()}
    for name, shape in shapes.items():
        yield copy(_LINEAR + name, f"linear_attn.{name}", shape)


def _by_key_head(text: Config) -> Iterator[Parameter]:
    """Yields the projections of Qwen3-Next, whose two tensors have the parts of each key head side by side; here they
    are apart, as Qwen3.5 has them."""
    hidden = required(text, "hidden_size")
    key_dim, value_dim, key_heads, value_heads = (required(text, name) for name in _DELTA)
    per_head = value_heads // key_heads
    sizes = {"q": key_dim, "k": key_dim, "v": per_head * value_dim, "z": per_head * value_dim}
    sources = {"qkvz": sizes, "ba": {"b": per_head, "a": per_head}}
    for name, source, parts in (("qkv", "qkvz", "qkv"), ("z", "qkvz", "z"), ("b", "ba", "b"), ("a", "ba", "a")):
        of_head = sources[source]
        firsts = dict(zip(of_head, itertools.accumulate(of_head.values(), initial=0), strict=False))
        rows, found, target = sum(of_head.values()), list[Block](), 0
        for part in parts:
            for head in range(key_heads):
                shape, size = (key_heads * rows, hidden), (of_head[part], hidden)
                found.append(
                    Block(
                        f"linear_attn.in_proj_{source}.weight",
                        shape,
                        (head * rows + firsts[part], 0),
                        (target, 0),
                        size,
                    )
                )
                target += of_head[part]
        yield Parameter(f"{_LINEAR}in_proj_{name}.weight", (target, hidden), tuple(found))


def _attention(text: Config) -> Iterator[Parameter]:
    """Yields the parameters of attention whose query projection has the gate, too.

    A head's rows of `q_proj` are its query, then its gate; Megatron has the queries of a group, then their gates, then
    key and value.
    """
    hidden, heads, groups = required(text, "hidden_size"), required(text, "num_attention_heads"), query_groups(text)
    width, per_group = head_dim(text, HEAD_DIM), heads // groups
    found, target = list[Block](), 0

    def add(name: str, rows: int, first: int) -> None:
        nonlocal target
        shape = (rows, hidden)
        found.append(Block(f"self_attn.{name}.weight", shape, (first, 0), (target, 0), (width, hidden)))
        target += width

    for group in range(groups):
        for part in (0, width):
            for head in range(group * per_group, (group + 1) * per_group):
                add("q_proj", 2 * heads * width, 2 * head * width + part)
        add("k_proj", groups * width, group * width)
        add("v_proj", groups * width, group * width)
    yield Parameter("self_attention.linear_qkv.weight", (target, hidden), tuple(found), split=0)
    yield blocks.norm("self_attention.q_layernorm", "self_attn.q_norm", width)
    yield blocks.norm("self_attention.k_layernorm", "self_attn.k_norm", width)
    yield copy("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (hidden, heads * width), split=1)


def _ignored(config: Config) -> tuple[str, ...]:
    return ignored_always(text_of(config)) + ((_PREDICTING,) if config.get(_VISION) else UNTRAINED)


def _family(name: str, *model_types: str) -> Family:
    return Family(name, model_types, _arguments, _parameters, _ignored, UNTRAINED)


QWEN3_NEXT = _family("Qwen3-Next", "qwen3_next")
QWEN3_5 = _family("Qwen3.5", "qwen3_5", "qwen3_5_text")
QWEN3_5_MOE = _family("Qwen3.5-MoE", "qwen3_5_moe", "qwen3_5_moe_text")
