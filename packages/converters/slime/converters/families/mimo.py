"""MiMo: Qwen2's layers, and multi-token prediction layers at `model.mtp_layers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family
from slime.converters.families.config_json import num_mtp_layers, required
from slime.converters.families.mapping import Parameter, swapped
from slime.converters.families.qwen import qwen2_layer


def _arguments(config: Config) -> dict[str, Any]:
    args = arguments.decoder(config) | arguments.ahead(config) | arguments.attention(config)
    return args | {"add_qkv_bias": True}


def _parameters(config: Config) -> Iterator[Parameter]:
    yield from blocks.decoder(config, lambda _: qwen2_layer(config))
    for number in range(num_mtp_layers(config)):
        name, hf_name = f"mtp.layers.{number}.", f"model.mtp_layers.{number}."
        for parameter in _around(required(config, "hidden_size")):
            yield parameter.at(name, hf_name)
        for parameter in qwen2_layer(config):
            yield parameter.at(f"{name}transformer_layer.", hf_name)


def _around(hidden: int) -> Iterator[Parameter]:
    """Yields the norms and the projection of an MTP layer: MiMo projects [hidden, embedding], Megatron [embedding,
    hidden]."""
    yield blocks.norm("enorm", "token_layernorm", hidden)
    yield blocks.norm("hnorm", "hidden_layernorm", hidden)
    yield swapped("eh_proj.weight", "input_proj.weight", (hidden, 2 * hidden), split=0)
    yield blocks.norm("final_layernorm", "final_layernorm", hidden)


MIMO = Family("MiMo", ("mimo",), _arguments, _parameters)
