"""Names of a rank's parameters in the whole model, as `slime.converters.families.mapping` has them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

EMBEDDING = "embedding.word_embeddings.weight"

_LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"(.*mlp\.experts\.local_experts\.)(\d+)(\..+)")
# Grouped experts of Transformer Engine: one parameter per expert, whose name ends in the expert's number.
_GROUPED_EXPERT = re.compile(r"(.*mlp\.experts)\.(linear_fc[12]\.(?:weight|bias))(\d+)")
# Transformer Engine keeps a norm inside the linear layer behind it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def unwrapped(chunk: torch.nn.Module) -> Any:
    """Returns the model inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def parameter_names(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name with global layer and expert numbers, parameter or buffer), chunk by chunk.

    The buffers are the biases of routers. A copy of the embedding on the last stage, where the output layer is tied to
    it or layers predict ahead, comes under the embedding's name.
    """
    for chunk in chunks:
        yield from _of_chunk(unwrapped(chunk))


def _of_chunk(model: Any) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield _global(model, name), parameter
    for name, buffer in model.named_buffers():
        if name.endswith(".router.expert_bias"):
            yield _global(model, name), buffer


def _global(model: Any, name: str) -> str:
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return EMBEDDING
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    part, index, rest = match.groups()
    number = getattr(model, part).layers[int(index)].layer_number - 1
    return f"{part}.layers.{number}.{_in_layer(rest, model.config)}"


def _in_layer(name: str, config: Any) -> str:
    prefix, bare = ("transformer_layer.", name.removeprefix("transformer_layer."))
    if bare in _FUSED_NORMS:
        return (prefix if bare != name else "") + _FUSED_NORMS[bare]
    match = _GROUPED_EXPERT.fullmatch(name)
    if match is not None:
        name = f"{match[1]}.local_experts.{match[3]}.{match[2]}"
    match = _LOCAL_EXPERT.fullmatch(name)
    if match is None:
        return name
    held = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = held * parallel_state.get_expert_model_parallel_rank()
    return f"{match[1]}{first + int(match[2])}{match[3]}"
