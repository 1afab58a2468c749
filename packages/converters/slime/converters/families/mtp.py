"""Layers for multi-token prediction (MTP), as DeepSeek V3 and GLM-4.5 keep them: behind the last layer.

`model.layers.{num_hidden_layers}` is one, with norms of the embedding and of the hidden state, a projection of both, a
layer like the others, a norm, and copies of the embedding and of the output layer that Megatron takes from the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime.converters.families.base import Config, ignored_always
from slime.converters.families.blocks import HF_LAYER, norm
from slime.converters.families.config_json import num_mtp_layers, required
from slime.converters.families.mapping import Parameter, copy


def mtp_parameters(config: Config, layer: Callable[[int], Iterable[Parameter]]) -> Iterator[Parameter]:
    """Yields the parameters of the MTP layers.

    layer(number): the parameters of the layer inside `model.layers.{number}`.
    """
    hidden, first = required(config, "hidden_size"), required(config, "num_hidden_layers")
    for number in range(num_mtp_layers(config)):
        name, hf_name = f"mtp.layers.{number}.", HF_LAYER.format(first + number)
        for parameter in _around(hidden):
            yield parameter.at(name, hf_name)
        for parameter in layer(first + number):
            yield parameter.at(f"{name}transformer_layer.", hf_name)


def _around(hidden: int) -> Iterator[Parameter]:
    yield norm("enorm", "enorm", hidden)
    yield norm("hnorm", "hnorm", hidden)
    yield copy("eh_proj.weight", "eh_proj.weight", (hidden, 2 * hidden), split=0)
    yield norm("final_layernorm", "shared_head.norm", hidden)


def without_missing(config: Config, tensors: Iterable[str]) -> dict[str, Any]:
    """Returns `config` without MTP layers if none of `tensors`, the names in its checkpoint, belongs to one.

    When transformers saves a model it drops such layers, but leaves their number in config.json.
    """
    first = int(config.get("num_hidden_layers") or 0)
    for name in tensors:
        match = re.match(r"model\.(mtp_layers|layers)\.(\d+)\.", name)
        if match is not None and (match[1] == "mtp_layers" or int(match[2]) >= first):
            return dict(config)
    return {**config, "num_nextn_predict_layers": 0}


def shared_copies(config: Config) -> tuple[str, ...]:
    """Returns the patterns of `Family.ignored`, with the copies that MTP layers hold."""
    first = required(config, "num_hidden_layers")
    numbers = "|".join(str(first + number) for number in range(num_mtp_layers(config)))
    copies = (rf"model\.layers\.({numbers})\.(embed_tokens|shared_head\.head)\.weight",) if numbers else ()
    return ignored_always(config) + copies
