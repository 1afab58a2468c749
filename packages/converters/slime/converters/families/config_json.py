"""Reads values of a config.json, whether transformers 4 or 5 or a model's own code wrote it."""

from __future__ import annotations

from typing import Any

from slime.converters.families.base import Config
from slime.types.errors import InvalidFile, NotAvailable


def required(config: Config, key: str) -> Any:
    """Returns the value of `key`. Raises InvalidFile if it is missing or null."""
    value = config.get(key)
    if value is None:
        raise InvalidFile(f"config.json has no {key}", field=key, expected=f"{key} of {config.get('model_type')}")
    return value


def refuse(config: Config, key: str, expected: Any, why: str) -> None:
    """Raises NotAvailable where config.json sets `key` to something that is neither `expected` nor null."""
    value = config.get(key)
    if value is not None and value != expected:
        raise NotAvailable.unavailable(f"{key} {value!r}", why).at("config.json")


def text_of(config: Config) -> Config:
    """Returns the part that describes the language model: the whole, or `text_config` of a model that reads images."""
    text = config.get("text_config")
    if text is None:
        return config
    return {**text, "tie_word_embeddings": config.get("tie_word_embeddings", text.get("tie_word_embeddings"))}


def check_vocab_size(config: Config, vocab_size: int | None) -> None:
    """Raises NotAvailable for another size of the vocabulary than the model's, where config.json cannot be changed."""
    text = text_of(config)
    if vocab_size not in (None, text.get("vocab_size")) and text is not config:
        why = "config.json has the size of the vocabulary in text_config, which is not changed"
        raise NotAvailable.unavailable(f"--vocab-size {vocab_size}", why)


def tied(config: Config) -> bool:
    """Returns whether the output layer is the embedding; all families here are untied by default."""
    return bool(config.get("tie_word_embeddings", False))


def head_dim(config: Config, default: int | None = None) -> int:
    """Returns the size of a head.

    default: that of the family's class in transformers; None where it divides the hidden size among the heads.
    """
    value = config.get("head_dim") or default
    return int(value or required(config, "hidden_size") // required(config, "num_attention_heads"))


def query_groups(config: Config) -> int:
    return int(config.get("num_key_value_heads") or required(config, "num_attention_heads"))


def num_mtp_layers(config: Config) -> int:
    """Returns the number of layers for multi-token prediction, which `num_hidden_layers` leaves out."""
    value = config.get("num_nextn_predict_layers")
    return int((config.get("num_mtp_layers") if value is None else value) or 0)


def rope(config: Config) -> dict[str, Any]:
    """Returns `rope_theta`, `rope_type` and the values of that type, whichever keys of config.json hold them."""
    parameters: dict[str, Any] = {"rope_theta": config.get("rope_theta") or 10000.0}
    if config.get("partial_rotary_factor") is not None:
        parameters["partial_rotary_factor"] = config["partial_rotary_factor"]
    for key in ("rope_scaling", "rope_parameters"):
        parameters |= {name: value for name, value in (config.get(key) or {}).items() if value is not None}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    return parameters


def rotary_base(config: Config) -> float:
    """Returns the base of the rotary embedding, as an int if it is whole: older versions of Megatron take only ints."""
    return whole(rope(config)["rope_theta"])


def whole(value: float) -> float:
    """Returns a whole number as an int."""
    return int(value) if float(value).is_integer() else value


def moe_layers(config: Config, count: int) -> list[int]:
    """Returns 1 for each of the first `count` layers with experts, 0 for each dense one."""
    kinds = config.get("mlp_layer_types")
    if kinds:
        # Layers for multi-token prediction, which the list leaves out, have experts.
        return [int(kind == "sparse") for kind in kinds[:count]] + [1] * (count - len(kinds))
    if "first_k_dense_replace" in config:
        first, step = config["first_k_dense_replace"] or 0, config.get("moe_layer_freq") or 1
        return [int(number >= first and number % step == 0) for number in range(count)]
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return [int(number not in dense and (number + 1) % step == 0) for number in range(count)]
