"""Llama 3, with its rotary scaling from 3.1 on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family
from slime.converters.families.config_json import head_dim, refuse, required
from slime.converters.families.mapping import Parameter


def _arguments(config: Config) -> dict[str, Any]:
    refuse(config, "attention_bias", False, "Megatron cannot have a bias on the attention's output only")
    refuse(config, "mlp_bias", False, "linear layers have no biases here")
    return arguments.decoder(config) | arguments.attention(config)


def _parameters(config: Config) -> Iterator[Parameter]:
    return blocks.decoder(config, lambda _: _layer(config))


def _layer(config: Config) -> Iterator[Parameter]:
    yield from blocks.layer_norms(required(config, "hidden_size"))
    yield from blocks.attention(config, head_dim(config))
    yield from blocks.dense_mlp(config)


LLAMA = Family("Llama 3", ("llama",), _arguments, _parameters)
