"""Qwen3-Next and Qwen3.5: arguments, names and layouts, and the way to Megatron and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from converters_tiny import hf_directory, random_tensors

from slime.converters.convert import hf_to_hf, hf_to_torch_dist, torch_dist_to_hf
from slime.converters.convert.hf_source import HfSource
from slime.converters.families import find_family, read_config
from slime.converters.families.qwen_gated import with_vision, with_vision_of
from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.converters.inspection.verify import compare
from slime.converters.megatron.args import check_model_args, parse_model_args
from slime.converters.torch_dist.reader import TorchDist
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000000,
    "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12,
}  # fmt: skip
NEXT = TEXT | EXPERTS | {"model_type": "qwen3_next", "norm_topk_prob": True}
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 9,
}  # fmt: skip
MOE = TEXT | EXPERTS | {"model_type": "qwen3_5_moe_text"}


def with_images(text: dict[str, Any]) -> dict[str, Any]:
    kind = text["model_type"].removesuffix("_text")
    return {"model_type": kind, "text_config": text, "vision_config": {}, "torch_dtype": "bfloat16"}


def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with all experts of a layer in two of them, as Qwen3.5 is published."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(4):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        parts = {
            part: torch.stack([tensors[f"{prefix}{number}.{part}_proj.weight"] for number in range(4)])
            for part in ("gate", "up", "down")
        }
        found[f"{prefix}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        found[f"{prefix}down_proj"] = parts["down"]
    return found


CONFIGS = {
    "next": NEXT, "dense": TEXT, "moe": MOE, "images": with_images(TEXT), "moe-images": with_images(MOE),
    "together": with_images(MOE),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shard_bytes", [20_000, 1 << 30])
def test_there_and_back_is_the_same_model(kind: str, shard_bytes: int, tmp_path: Path) -> None:
    config = CONFIGS[kind]
    tensors = random_tensors(config)
    if kind == "together":
        tensors = together(tensors)
    if "images" in kind or kind == "together":
        tensors["model.visual.patch_embed.proj.weight"] = torch.randn(8, 3, 2, 4, 4).bfloat16()
    tensors["mtp.fc.weight"] = torch.randn(32, 64).bfloat16()
    source = hf_directory(tmp_path / "hf", config, tensors, shard_bytes=shard_bytes)
    directory = hf_to_torch_dist.convert(source, tmp_path / "td")
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
    assert not list(compare(source, back)) and not list(compare(source, directory))
    assert SafetensorsDir(back).tensors.keys() == tensors.keys()
    assert json.loads((back / "config.json").read_text()) == config


def test_what_sees_goes_through_megatron_bit_by_bit(tmp_path: Path) -> None:
    config = with_images(TEXT) | {"vision_config": VISION, "tie_word_embeddings": False}
    whole = with_vision(config)
    tensors = random_tensors(whole)
    assert tensors["model.visual.merger.linear_fc2.weight"].shape == (32, 64)
    source = hf_directory(tmp_path / "hf", config, tensors)
    directory = hf_to_torch_dist.convert(source, tmp_path / "td")
    seeing = {key for key in TorchDist(directory).tensors if key.startswith("visual.")}
    assert {f"model.{key.replace('.tower', '')}" for key in seeing} == {n for n in tensors if ".visual." in n}
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
    assert not list(compare(source, back)) and SafetensorsDir(back).tensors.keys() == tensors.keys()
    for name, tensor in SafetensorsDir(back):
        assert torch.equal(tensor, tensors[name]), name
    # Without it, or with a part of it, the files are those of a language model, and the rest stays as it is.
    assert with_vision_of(config, tensors) == whole
    assert with_vision_of(config, [n for n in tensors if "merger" not in n]) == config
    assert with_vision({**config, "model_type": "qwen3_5_moe"}) == {**config, "model_type": "qwen3_5_moe"}
    names = {block.name for p in find_family(config).parameters(config) for block in p.blocks}
    assert names == {name for name in tensors if ".visual." not in name}


def test_layers_of_several_kinds_have_keys_of_their_own(tmp_path: Path) -> None:
    checkpoint = TorchDist(hf_to_torch_dist.convert(hf_directory(tmp_path / "hf", MOE), tmp_path / "td"))
    shapes = {key: entry.shape for key, entry in checkpoint.tensors.items()}
    assert shapes["decoder.layers.0.self_attention.linear_attn.conv1d.weight"] == (56, 1, 4)
    assert shapes["decoder.layers.3.self_attention.linear_qkv.weight"] == (2 * (2 + 2 + 1 + 1) * 8, 32)
    assert shapes["decoder.layers.2.mlp.shared_experts.gate_weight"] == (1, 32)
    assert shapes["decoder.layers.2.mlp.experts.experts.linear_fc2.weight"] == (4, 32, 16)


def test_queries_of_a_group_come_before_their_gates() -> None:
    tensors = {name: tensor.float() for name, tensor in random_tensors(TEXT).items()}
    parameter = next(
        p for p in find_family(TEXT).parameters(TEXT) if p.name.endswith("3.self_attention.linear_qkv.weight")
    )
    whole = torch.zeros(parameter.shape)
    for piece in parameter.slices():
        whole[piece.index] = tensors[piece.hf_name][piece.hf_index]
    q, k, v = (tensors[f"model.layers.3.self_attn.{name}_proj.weight"] for name in "qkv")
    by_head = q.view(4, 2, 8, 32)
    groups = []
    for group in range(2):
        heads = by_head[2 * group : 2 * group + 2]
        keys, values = (t.view(2, 8, 32)[group] for t in (k, v))
        groups += [heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1), keys, values]
    assert torch.equal(whole, torch.cat(groups))


# The flags of the original's qwen3.5-9B.sh and qwen3.5-35B-A3B.sh, with other sizes.
FLAGS_9B = """--spec slime_plugins.models.qwen3_5 get_qwen3_5_spec --disable-bias-linear --qk-layernorm
    --group-query-attention --num-attention-heads 4 --num-query-groups 2 --kv-channels 8 --num-layers 4 --hidden-size 32
    --ffn-hidden-size 48 --use-gated-attention --normalization RMSNorm --apply-layernorm-1p
    --position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 0.25 --swiglu
    --untie-embeddings-and-output-weights --vocab-size 131 --rotary-base 10000000 --attention-output-gate"""
FLAGS_35B = """--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 12 --moe-router-score-function softmax
    --moe-router-topk 2 --moe-layer-freq [1,1,1,1] --num-experts 4 --moe-router-dtype fp32 --moe-shared-expert-gate"""


def test_the_flags_of_the_originals_scripts_describe_the_models() -> None:
    values, rest = parse_model_args(FLAGS_9B.split())
    assert not rest and values["attention_output_gate"] and "use_gated_attention" not in values
    check_model_args(values, with_images(TEXT))
    check_model_args(parse_model_args([*FLAGS_9B.split(), *FLAGS_35B.split()])[0], with_images(MOE))
    for words, message in (
        (["--use-gated-attention"], "--attention-output-gate: config.json says no --attention-output-gate"),
        (["--linear-attention-freq", "2"], "--linear-attention-freq 2: config.json says none"),
    ):
        plain = {**TEXT, "model_type": "qwen3", "partial_rotary_factor": 1.0}
        with pytest.raises(InvalidSetting, match=message):
            check_model_args(parse_model_args(words)[0], plain)
    check_model_args(parse_model_args(["--linear-attention-freq", "[1,1,1,0]"])[0], NEXT)
    with pytest.raises(InvalidSetting, match=r"--linear-attention-freq 2: config.json says \[1\]\*3"):
        check_model_args(parse_model_args(["--linear-attention-freq", "2"])[0], NEXT)


@pytest.mark.parametrize(
    ("changes", "frequency"),
    [
        ({}, 4),
        ({"full_attention_interval": 2}, 2),
        ({"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]}, [1, 0, 0, 1]),
        ({"layer_types": ["full_attention"] * 4}, [0, 0, 0, 0]),
    ],
)
def test_layer_types_say_which_layers_have_delta_nets(changes: dict[str, Any], frequency: Any) -> None:
    assert find_family(NEXT).arguments({**NEXT, **changes})["linear_attention_freq"] == frequency
    names = {p.name.split(".")[2] for p in find_family(NEXT).parameters({**NEXT, **changes}) if "linear_attn" in p.name}
    kinds = [int((i + 1) % frequency > 0) for i in range(4)] if isinstance(frequency, int) else frequency
    assert names == {str(number) for number, linear in enumerate(kinds) if linear}


def test_what_cannot_be_described_is_refused_by_name(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf", with_images(TEXT))
    for convert, value in ((hf_to_hf.convert, source), (torch_dist_to_hf.convert, tmp_path / "td")):
        if convert is torch_dist_to_hf.convert:
            hf_to_torch_dist.convert(source, value)
        with pytest.raises(
            NotAvailable, match="--vocab-size 120 .*config.json has the size of the vocabulary in text_co"
        ):
            convert(value, tmp_path / "out", vocab_size=120)
    with pytest.raises(NotAvailable, match="attention_bias True"):
        find_family(TEXT).arguments({**TEXT, "attention_bias": True})
    (source / "config.json").write_text(json.dumps(with_images({**TEXT, "linear_num_key_heads": 3})))
    with pytest.raises(
        InvalidFile, match="linear_num_key_heads must be a divisor of linear_num_value_heads = 4, got 3"
    ):
        read_config(source)
    wrong = with_images({**TEXT, "linear_value_head_dim": 12})
    with pytest.raises(InvalidFile, match=r"of another shape: model.language_model.layers.0.linear_attn"):
        family = find_family(wrong)
        HfSource(source, wrong).check(list(family.parameters(wrong)), family.ignored(wrong))
