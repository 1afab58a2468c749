from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from converters_published import (
    ARGUMENTS,
    DEEPSEEK_V3,
    GLM5,
    GLM45,
    GLM47_FLASH,
    LLAMA32_1B,
    MINIMAX_M25,
    QWEN3_4B,
    QWEN3_30B_A3B,
    QWEN25_05B,
    SAME,
)
from converters_tiny import QWEN3

from slime.converters.families import FAMILIES, find_family, read_config
from slime.converters.families.mapping import Parameter
from slime.types.errors import InvalidFile, MissingFile, NotAvailable

# Billions of parameters, without multi-token-prediction layers.
SIZES = {
    "Qwen2.5-0.5B": 0.494,
    "Qwen3-4B": 4.02,
    "Qwen3-30B-A3B": 30.5,
    "Llama-3.2-1B": 1.24,
    "GLM-Z1-9B": 9.40,
    "GLM-4.5": 353.0,
    "DeepSeek-V3": 671.0,
    "Moonlight": 16.0,
    "GLM-4.7-Flash": 29.9,
    "GLM-5": 743.9,
    "MiniMax-M2.5": 228.7,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_those_of_the_published_model(name: str) -> None:
    config, expected = ARGUMENTS[name]
    assert find_family(config).arguments(config) == {**SAME, **expected}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_transformers_5_writes_the_same_model_otherwise(name: str) -> None:
    config, expected = ARGUMENTS[name]
    newer = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    scaling = dict(config.get("rope_scaling") or {})
    newer["rope_parameters"] = {
        "rope_theta": config["rope_theta"],
        "rope_type": scaling.pop("type", None) or scaling.pop("rope_type", "default"),
        **scaling,
    }
    if "partial_rotary_factor" in newer:
        newer["rope_parameters"]["partial_rotary_factor"] = newer.pop("partial_rotary_factor")
    assert find_family(newer).arguments(newer) == {**SAME, **expected}


@pytest.mark.parametrize("name", SIZES)
def test_tables_have_as_many_elements_as_the_published_model(name: str) -> None:
    config, _ = ARGUMENTS[name]
    parameters = find_family(config).parameters(config)
    count = sum(_size(parameter) for parameter in parameters if not parameter.name.startswith("mtp."))
    assert count / 1e9 == pytest.approx(SIZES[name], rel=0.005)


def _size(parameter: Parameter) -> int:
    size = 1
    for length in parameter.shape:
        size *= length
    return size


def test_kimi_k2_has_the_table_of_deepseek_v3() -> None:
    kimi = {**DEEPSEEK_V3, "model_type": "kimi_k2", "num_nextn_predict_layers": 0}
    assert find_family(kimi) is find_family(DEEPSEEK_V3)
    assert "mtp_num_layers" not in find_family(kimi).arguments(kimi)


def test_what_a_config_leaves_out_has_the_default_of_transformers() -> None:
    bare = {key: value for key, value in QWEN3_4B.items() if key not in ("head_dim", "tie_word_embeddings")}
    args = find_family(bare).arguments(bare)
    assert args["kv_channels"] == 128
    assert args["untie_embeddings_and_output_weights"]
    moe = {key: value for key, value in QWEN3_30B_A3B.items() if key != "norm_topk_prob"}
    assert find_family(moe).arguments(moe)["moe_router_pre_softmax"]
    known = find_family(MINIMAX_M25).arguments(MINIMAX_M25)
    bare = {key: value for key, value in MINIMAX_M25.items() if key not in ("head_dim", "rope_theta", "rotary_dim")}
    del known["rotary_percent"]
    assert find_family(bare).arguments(bare) == known
    known = find_family(GLM5).arguments(GLM5)
    left_out = {"first_k_dense_replace", "rms_norm_eps", "index_topk", "index_n_heads", "index_head_dim"}
    bare = {key: value for key, value in GLM5.items() if key not in left_out}
    assert find_family(bare).arguments(bare) == known
    names = {block.name for parameter in find_family(bare).parameters(bare) for block in parameter.blocks}
    assert {f"model.layers.{layer}.self_attn.indexer.k_norm.bias" for layer in (0, 77, 78)} <= names
    assert find_family(GLM5).arguments({**GLM5, "index_topk_pattern": "F" * 78, "index_topk_freq": 1}) == known


def test_layers_with_experts_are_those_that_transformers_5_lists() -> None:
    family = find_family(GLM47_FLASH)
    bare = {key: value for key, value in GLM47_FLASH.items() if key not in ("first_k_dense_replace", "rms_norm_eps")}
    assert family.arguments(bare) == family.arguments(GLM47_FLASH)
    listed = bare | {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]}
    assert family.arguments(listed)["moe_layer_freq"] == [1, 0, 1]
    names = {parameter.name for parameter in family.parameters(listed)}
    assert [f"decoder.layers.{i}.mlp.router.weight" in names for i in range(3)] == [True, False, True]
    assert "mtp.layers.0.transformer_layer.mlp.router.weight" in names


def test_dense_layers_among_those_with_experts_are_listed() -> None:
    config = {**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    family = find_family(config)
    assert family.arguments(config)["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]
    names = {parameter.name for parameter in family.parameters(config)}
    assert [f"decoder.layers.{i}.mlp.router.weight" in names for i in range(6)] == [i in (1, 5) for i in range(6)]
    assert [f"decoder.layers.{i}.mlp.linear_fc1.weight" in names for i in range(6)] == [
        i not in (1, 5) for i in range(6)
    ]


@pytest.mark.parametrize(
    ("config", "change", "field"),
    [
        (QWEN25_05B, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN25_05B, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN25_05B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type"),
        (QWEN3_4B, {"attention_bias": True}, "attention_bias"),
        (LLAMA32_1B, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA32_1B, {"rope_scaling": {**LLAMA32_1B["rope_scaling"], "low_freq_factor": 2.0}}, "low_freq_factor"),
        (GLM45, {"norm_topk_prob": False}, "norm_topk_prob"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (GLM5, {"indexer_types": ["full"] * 3 + ["shared"] * 75}, "indexer_types"),
        (GLM5, {"index_topk_freq": 4}, "index_topk_freq"),
        (GLM5, {"index_topk_pattern": "FFS"}, "index_topk_pattern"),
        (GLM5, {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        (GLM5, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type"),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type"),
        (DEEPSEEK_V3, {"num_experts_per_tok": 6}, "topk_group"),
        (GLM47_FLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (MINIMAX_M25, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX_M25, {"use_qk_norm": False}, "use_qk_norm"),
        (MINIMAX_M25, {"use_routing_bias": False}, "use_routing_bias"),
        (MINIMAX_M25, {"scoring_func": "softmax"}, "scoring_func"),
        (MINIMAX_M25, {"shared_intermediate_size": 1536}, "shared_intermediate_size"),
        (MINIMAX_M25, {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        (MINIMAX_M25, {"attn_type_list": [0] + [1] * 61}, "attn_type_list"),
        (MINIMAX_M25, {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ],
)
def test_what_megatron_cannot_build_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    with pytest.raises(NotAvailable) as raised:
        find_family(config).arguments({**config, **change})
    assert raised.value.field == field


@pytest.mark.parametrize(("config", "name"), [(QWEN3_4B, "num_hidden_layers"), (GLM5, "index_topk")])
def test_a_missing_size_is_named(config: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidFile) as raised:
        find_family(config).arguments({**config, name: None})
    assert raised.value.field == name


def test_an_unknown_model_type_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(NotAvailable) as raised:
        find_family({"model_type": "mamba"})
    assert raised.value.field == "model_type"
    for family in FAMILIES:
        for model_type in family.model_types:
            assert model_type in raised.value.message


def test_a_config_without_a_type_goes_by_the_name_of_the_model() -> None:
    assert find_family({}, model_name="Qwen3-MoE-tiny").name == "Qwen3-MoE"
    assert find_family({}, model_name="DeepSeek-V3").name == "DeepSeek V3"
    assert find_family({"model_type": "llama"}, model_name="qwen2").name == "Llama 3"
    with pytest.raises(NotAvailable):
        find_family({}, model_name="other")


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile):
        read_config(tmp_path)
    for text in ("{", "[1]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(InvalidFile) as raised:
            read_config(tmp_path)
        assert str(tmp_path) in raised.value.message
    (tmp_path / "config.json").write_text(json.dumps(GLM45))
    assert read_config(tmp_path) == GLM45


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "2560"}, "hidden_size must be a whole number of at least 1, got '2560'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number of at least 1, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number of at least 1, got True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must be a divisor of num_attention_heads = 4, got 3"),
        ({"rope_theta": -1.0}, "rope_theta must be a number above 0, got -1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number above 0, at most 1, got 1.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, got 'yarn'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling must be an object with a rope_type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor must be a number above 0, got '4'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
        ({"model_type": ["qwen3"]}, "model_type must be a string"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok must be at most num_experts = 4, got 5"),
        ({"n_routed_experts": 6, "n_group": 4}, "n_group must be a divisor of n_routed_experts = 6, got 4"),
        ({"mlp_only_layers": [1.5]}, "mlp_only_layers must be a list of whole numbers, got [1.5]"),
        ({"head_dim": 16, "rotary_dim": 32}, "rotary_dim must be at most head_dim = 16, got 32"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types must be a list of dense and sparse, got ['moe']"),
    ],
)
def test_a_value_that_no_model_has_is_named_with_what_it_should_be(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | changes))
    with pytest.raises(InvalidFile, match=re.escape(words)) as caught:
        read_config(tmp_path)
    assert caught.value.field in changes or caught.value.field == "factor"
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | dict.fromkeys(("rope_theta", "partial_rotary_factor"))))
    read_config(tmp_path)
