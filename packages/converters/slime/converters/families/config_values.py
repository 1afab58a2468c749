"""Checks the type and range of each value of a config.json before sizes are computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.types.errors import InvalidFile


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole(0), value))


def _kinds_of_layers(value: Any) -> bool:
    return isinstance(value, list) and all(kind in ("dense", "sparse") for kind in value)


# (description, test of a value, keys); null counts as missing.
_KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("a whole number of at least 1", _whole(1), (
        "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "num_experts", "num_local_experts",
        "n_routed_experts", "num_experts_per_tok", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads", "linear_conv_kernel_dim", "shared_expert_intermediate_size",
        "full_attention_interval", "rotary_dim", "index_topk", "index_n_heads", "index_head_dim",
    )),
    ("a whole number of at least 0", _whole(0), (
        "head_dim", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "moe_layer_freq",
        "decoder_sparse_step", "num_nextn_predict_layers", "num_mtp_layers", "shared_intermediate_size",
    )),
    ("a number above 0, at most 1", lambda value: _positive(value) and value <= 1, ("partial_rotary_factor",)),
    ("a number above 0", _positive, (
        "rms_norm_eps", "rope_theta", "factor", "original_max_position_embeddings",
        "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    )),
    ("a number", _number, ("routed_scaling_factor", "mscale", "mscale_all_dim")),
    ("true or false", lambda value: isinstance(value, bool), (
        "tie_word_embeddings", "attention_bias", "mlp_bias", "use_qk_norm", "norm_topk_prob", "use_sliding_window",
        "rope_interleave", "use_routing_bias", "indexer_rope_interleave",
    )),
    ("a list of whole numbers", _whole_numbers, ("mlp_only_layers", "attn_type_list")),
    ("a list of dense and sparse", _kinds_of_layers, ("mlp_layer_types",)),
    ("a string", lambda value: isinstance(value, str), (
        "model_type", "hidden_act", "rope_type", "type", "scoring_func", "topk_method", "qk_norm_type",
    )),
    ("an object", lambda value: isinstance(value, dict), ("rope_scaling", "rope_parameters", "quantization_config")),
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# (key, other key, test of both values, description of the relation)
_RELATIONS: tuple[tuple[str, str, Callable[[int, int], bool], str], ...] = (
    ("num_key_value_heads", "num_attention_heads", lambda a, b: b % a == 0, "a divisor of"),
    ("linear_num_key_heads", "linear_num_value_heads", lambda a, b: b % a == 0, "a divisor of"),
    ("n_group", "n_routed_experts", lambda a, b: b % a == 0, "a divisor of"),
    ("topk_group", "n_group", lambda a, b: a <= b, "at most"),
    ("rotary_dim", "head_dim", lambda a, b: a <= b, "at most"),
    *(("num_experts_per_tok", key, lambda a, b: a <= b, "at most") for key in _EXPERTS),
)


def check_values(path: Path, config: Mapping[str, Any]) -> None:
    """Raises InvalidFile naming the first key with a value that no model has. path: of the file, for the message."""
    if isinstance(config.get("text_config"), Mapping):
        # That of a model that reads images.
        check_values(path, config["text_config"])
    for kind, fits, keys in _KINDS:
        for where in (config, config.get("rope_scaling"), config.get("rope_parameters")):
            values = where if isinstance(where, Mapping) else {}
            for key in keys:
                if values.get(key) is not None and not fits(values[key]):
                    raise _wrong(path, key, values[key], kind)
    for key, other, agree, relation in _RELATIONS:
        if config.get(key) and config.get(other) and not agree(config[key], config[other]):
            raise _wrong(path, key, config[key], f"{relation} {other} = {config[other]}")
    scaling = config.get("rope_scaling")
    if scaling and not {"rope_type", "type"} & scaling.keys():
        raise _wrong(path, "rope_scaling", scaling, "an object with a rope_type")


def _wrong(path: Path, key: str, value: Any, expected: str) -> InvalidFile:
    return InvalidFile.must_be(key, expected, got=value).at(str(path))
