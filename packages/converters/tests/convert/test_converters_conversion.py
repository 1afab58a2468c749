"""hf-to-torch-dist, torch-dist-to-hf and to-hf: what they write, and what they refuse."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from converters_tiny import MINIMAX, MOE, QWEN3, all_files, hf_directory, names, random_tensors
from safetensors.torch import load_file

from slime.converters.cli import main
from slime.converters.convert import hf_to_torch_dist, int4, to_hf, torch_dist_to_hf
from slime.converters.files.safetensors_dir import INDEX, SafetensorsDir
from slime.converters.inspection.verify import compare
from slime.converters.torch_dist.keys import Layout
from slime.converters.torch_dist.reader import TorchDist
from slime.types.directories import MARK
from slime.types.errors import ConfigError, InvalidFile, MissingFile, NotAvailable


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "config",
    [QWEN3, QWEN3 | {"tie_word_embeddings": True}, MOE, MINIMAX],
    ids=["dense", "tied", "moe", "minimax"],
)
def test_there_and_back_is_the_same_directory(config: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf", config, dtype=dtype)
    directory = hf_to_torch_dist.convert(source, tmp_path / "td")
    assert directory == tmp_path / "td" / "release"
    assert (tmp_path / "td" / "latest_checkpointed_iteration.txt").read_text() == "release"
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
    assert names(back) == sorted([*names(source), MARK])
    assert not list(compare(source, back)) and not list(compare(source, directory))
    for name in ("config.json", "tokenizer.json", INDEX):
        assert (back / name).read_bytes() == (source / name).read_bytes() or name == INDEX
    weight_maps = [json.loads((path / INDEX).read_text())["weight_map"] for path in (source, back)]
    assert weight_maps[0] == weight_maps[1]


def test_norms_across_heads_are_read_by_the_names_of_the_original(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_directory(tmp_path / "hf", MINIMAX)
    ours = Layout.place
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "place", lambda self, name: ours(self, re.sub(r"\b([qk])_layernorm\b", r"\1_norm", name)))
        patch.setattr(Layout, "aliases", lambda self, name: [])
        directory = hf_to_torch_dist.convert(source, tmp_path / "td")
    keys = {key for key in TorchDist(directory).tensors if "self_attention" in key}
    assert {key.rpartition("self_attention.")[2] for key in keys} == {
        "linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight", "q_norm.weight", "k_norm.weight",
    }  # fmt: skip
    assert not list(compare(source, torch_dist_to_hf.convert(directory, tmp_path / "back")))


def test_tensors_are_those_that_megatron_stacks(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf", MOE)
    checkpoint = TorchDist(
        hf_to_torch_dist.convert(source, tmp_path / "td", megatron_args={"tensor_model_parallel_size": 2})
    )
    shapes = {key: entry.shape for key, entry in checkpoint.tensors.items()}
    assert shapes["embedding.word_embeddings.weight"] == (256, 32)
    key = "mlp.experts.experts.linear_fc1.weight"
    stacked = [name for name in shapes if name.endswith(key)]
    if stacked == [f"decoder.layers.{key}"]:
        assert shapes[stacked[0]] == (3, 4, 32, 32)
    else:
        assert len(stacked) == 3 and shapes[stacked[0]] == (4, 32, 32)
    embedding = checkpoint.load("embedding.word_embeddings.weight")
    assert torch.equal(embedding[:131], random_tensors(MOE)["model.embed_tokens.weight"]) and not embedding[131:].any()
    args = checkpoint.common()["args"]
    assert (args.num_layers, args.num_experts, args.padded_vocab_size) == (3, 4, 256)
    assert checkpoint.common()["iteration"] == 0 and checkpoint.args()["hidden_size"] == 32


def test_two_workers_write_what_one_does(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    for count in (1, 2):
        hf_to_torch_dist.convert(source, tmp_path / f"td{count}", num_workers=count)
        torch_dist_to_hf.convert(tmp_path / "td1", tmp_path / f"back{count}", num_workers=count)
    assert len(list((tmp_path / "td2" / "release").glob("__[01]_0.distcp"))) == 2
    assert not list(compare(tmp_path / "td1", tmp_path / "td2"))
    for first, second in zip(all_files(tmp_path / "back1"), all_files(tmp_path / "back2"), strict=True):
        assert first.read_bytes() == second.read_bytes()


def test_tensors_that_are_no_parameters_come_back(tmp_path: Path) -> None:
    config = QWEN3 | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.rotary_emb.inv_freq"] = torch.rand(4)
    source = hf_directory(tmp_path / "hf", config, tensors)
    hf_to_torch_dist.convert(source, tmp_path / "td")
    assert "output_layer.weight" not in TorchDist(tmp_path / "td").tensors
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
    assert not list(compare(source, back))
    assert not list(compare(source, tmp_path / "td"))


def test_mixed_dtypes_keep_theirs(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3)
    tensors["model.layers.1.input_layernorm.weight"] = torch.randn(32)
    source = hf_directory(tmp_path / "hf", tensors=tensors)
    hf_to_torch_dist.convert(source, tmp_path / "td")
    key = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    assert TorchDist(tmp_path / "td").tensors[key].dtype == torch.float32
    assert not list(compare(source, torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")))


def test_another_dtype_and_other_shards(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    directory = hf_to_torch_dist.convert(source, tmp_path / "td", dtype="float32")
    assert TorchDist(directory).tensors["decoder.final_layernorm.weight"].dtype == torch.float32
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back", dtype="bfloat16", max_shard_bytes=10**9)
    assert names(back) == ["config.json", "model.safetensors", MARK, "tokenizer.json"]
    assert not list(compare(source, back))
    assert json.loads((back / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_rows_of_the_vocabulary(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    hf_to_torch_dist.convert(source, tmp_path / "td", megatron_args={"make_vocab_size_divisible_by": 4})
    assert TorchDist(tmp_path / "td").tensors["output_layer.weight"].shape == (132, 32)
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back", vocab_size=100)
    assert SafetensorsDir(back).tensors["lm_head.weight"].shape == (100, 32)
    assert json.loads((back / "config.json").read_text())["vocab_size"] == 100
    with pytest.raises(InvalidFile, match=r"has shape \[132, 32\], expected at least 133 rows"):
        torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "more", vocab_size=133)


def quantise(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 weight, factors of blocks of 128 x 128), as DeepSeek's checkpoints have them."""
    rows, columns = (-(-size // 128) for size in tensor.shape)
    factors = torch.rand(rows, columns) + 0.5
    return tensor.float().to(torch.float8_e4m3fn), factors


def test_fp8_becomes_bfloat16(tmp_path: Path) -> None:
    config = QWEN3 | {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 1} | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    }  # fmt: skip
    plain, stored = random_tensors(config), {}
    for name, tensor in list(plain.items()):
        if "proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantise(tensor)
            factor = stored[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            rows, columns = tensor.shape
            plain[name] = (stored[name].float() * factor[:rows, :columns]).to(torch.bfloat16)
        else:
            stored[name] = tensor
    source = hf_directory(tmp_path / "hf", config, stored)
    hf_to_torch_dist.convert(source, tmp_path / "td")
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
    found = {name: tensor for file in back.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(found[name], tensor), name
    written = json.loads((back / "config.json").read_text())
    assert "quantization_config" not in written and written["torch_dtype"] == "bfloat16"
    again = to_hf.convert(source, tmp_path / "again")
    assert not list(compare(back, again))

    del stored["model.layers.0.mlp.up_proj.weight_scale_inv"]
    with pytest.raises(InvalidFile, match=r"factors of fp8.*mlp\.up_proj\.weight"):
        hf_to_torch_dist.convert(hf_directory(tmp_path / "less", config, stored), tmp_path / "td2")


def test_int4_becomes_bfloat16(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "symmetric": True, "group_size": 16, "strategy": "group"}
    groups = {"config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}
    config = QWEN3 | {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"} | groups
    }
    plain, stored = random_tensors(config), {}
    for name, tensor in list(plain.items()):
        if "proj" not in name:
            stored[name] = tensor
            continue
        packed, scales = int4.quantize(tensor, 16)
        stored |= {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_shape": torch.tensor(tensor.shape)}
        plain[name] = int4.dequantize(packed, scales).to(torch.bfloat16)
    source = hf_directory(tmp_path / "hf", config, stored)
    hf_to_torch_dist.convert(source, tmp_path / "td")
    for origin in (None, source):
        back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / f"back-{origin is None}", origin_hf_dir=origin)
        found = {name: tensor for file in back.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert found.keys() == plain.keys()
        for name, tensor in plain.items():
            assert torch.equal(found[name], tensor), name
        assert "quantization_config" not in json.loads((back / "config.json").read_text())


@pytest.mark.parametrize(
    ("quantization", "told"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size \[0, 128\]"),
        ({"quant_method": "fp8", "weight_block_size": ["128", 128]}, r"weight_block_size \['128', 128\]"),
    ],
)
def test_another_quantisation_is_refused(tmp_path: Path, quantization: dict[str, Any], told: str) -> None:
    source = hf_directory(tmp_path / "hf", QWEN3 | {"quantization_config": quantization})
    with pytest.raises(NotAvailable, match=told):
        hf_to_torch_dist.convert(source, tmp_path / "td")


def test_missing_unexpected_and_misshaped_tensors_are_all_named(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.7.surprise"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(33)
    source = hf_directory(tmp_path / "hf", tensors=tensors)
    with pytest.raises(InvalidFile) as error:
        hf_to_torch_dist.convert(source, tmp_path / "td")
    for text in (
        "1 missing: model.layers.2.mlp.up_proj.weight",
        "1 unexpected: model.layers.7.surprise",
        "model.norm.weight [33], expected [32]",
    ):
        assert text in str(error.value)
    assert not (tmp_path / "td").exists()


def test_weights_of_whole_numbers_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(QWEN3)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    with pytest.raises(InvalidFile, match=r"not of a floating-point type: model\.norm\.weight I8"):
        hf_to_torch_dist.convert(hf_directory(tmp_path / "hf", tensors=tensors), tmp_path / "td")


def test_an_output_layer_of_its_own_contradicts_a_tied_embedding(tmp_path: Path) -> None:
    config = QWEN3 | {"tie_word_embeddings": True}
    tensors = random_tensors(QWEN3)
    source = hf_directory(tmp_path / "hf", config, tensors)
    with pytest.raises(InvalidFile, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*tie_word"):
        hf_to_torch_dist.convert(source, tmp_path / "td")
    assert not (tmp_path / "td").exists()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    hf_to_torch_dist.convert(hf_directory(tmp_path / "copy", config, tensors), tmp_path / "td")


def test_contradictory_flags_are_told_with_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_directory(tmp_path / "hf")
    where = ["--hf-checkpoint", str(source), "--save", str(tmp_path / "td")]
    assert main(["hf-to-torch-dist", "--num-layers", "4", "--hidden-size", "64", *where]) == 2
    told = capsys.readouterr().err
    assert "--num-layers 4: config.json says 3" in told and "--hidden-size 64: config.json says 32" in told
    assert main(["hf-to-torch-dist", "--model-type", "qwen3-4B", *where]) == 2
    assert "--num-layers 36: config.json says 3" in capsys.readouterr().err
    assert main(["hf-to-torch-dist", "--num-layer", "3", *where]) == 2
    assert "did you mean --num-layers?" in capsys.readouterr().err
    assert main(["hf-to-torch-dist", "--hf-chekpoint", str(source), "--save", str(tmp_path / "td")]) == 2
    assert "did you mean --hf-checkpoint?" in capsys.readouterr().err
    assert main(["hf-to-torch-dist", "--lr", "1e-6", *where]) == 2
    assert "--lr belongs to training" in capsys.readouterr().err
    assert not (tmp_path / "td").exists()
    assert (
        main(["hf-to-torch-dist", "--num-layers", "3", "--swiglu", "--pipeline-model-parallel-size", "3", *where]) == 0
    )


def test_the_command_line_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_directory(tmp_path / "hf")
    directory, back = tmp_path / "td", tmp_path / "back"
    assert main(["hf-to-torch-dist", "--hf-checkpoint", str(source), "--save", str(directory)]) == 0
    options = ["--output-dir", str(back), "--origin-hf-dir", str(source), "--max-shard-size", "1GB"]
    assert main(["torch-dist-to-hf", "--input-dir", str(directory / "release"), *options]) == 0
    capsys.readouterr()
    assert main(["verify", str(source), str(back)]) == 0 and main(["verify", str(directory), str(back)]) == 0
    assert main(["inspect", str(directory), "--containing", "linear_fc1.weight"]) == 0
    assert "decoder.layers.mlp.linear_fc1.weight  BF16  [3, 96, 32]" in capsys.readouterr().out
    assert (
        main(["torch-dist-to-hf", "--input-dir", str(directory), *options[:2], "--max-shard-size", "5 furlongs"]) == 2
    )
    assert "--max-shard-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--tensor-model-parallel-size", "8"],
            "--tensor-model-parallel-size must be a divisor of the model's 4 attention heads, got 8",
        ),
        (
            ["--pipeline-model-parallel-size", "2"],
            "--pipeline-model-parallel-size must be a divisor of the model's 3 layers, got 2",
        ),
        (
            ["--expert-model-parallel-size", "3"],
            "--expert-model-parallel-size must be a divisor of the model's 4 experts, got 3",
        ),
        (["--expert-tensor-parallel-size", "3"], "--expert-tensor-parallel-size 3: decoder.layers.0.mlp.experts"),
    ],
)
def test_sizes_that_the_model_cannot_be_cut_by_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    source = hf_directory(tmp_path / "hf", MOE)
    where = ["--hf-checkpoint", str(source), "--save", str(tmp_path / "td")]
    assert main(["hf-to-torch-dist", *flags, *where]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "td").exists()


def test_a_checkpoint_of_another_model_is_told_apart(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf")
    hf_to_torch_dist.convert(source, tmp_path / "td")
    more = hf_directory(tmp_path / "more", QWEN3 | {"num_hidden_layers": 4})
    with pytest.raises(InvalidFile, match="another number of layers"):
        torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back", origin_hf_dir=more)
    tied = hf_directory(tmp_path / "tied", QWEN3 | {"tie_word_embeddings": True})
    with pytest.raises(InvalidFile, match=r"no place for: output_layer\.weight"):
        torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back", origin_hf_dir=tied)
    shutil.rmtree(tmp_path / "td" / "release" / "hf")
    with pytest.raises(MissingFile, match="--origin-hf-dir is required"):
        torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")


def test_to_hf_takes_whatever_training_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = hf_directory(tmp_path / "hf", dtype=torch.float32)
    for step in (2, 10):
        hf_directory(tmp_path / "fsdp" / f"step_{step:06d}", dtype=torch.float32)
    newest = tmp_path / "fsdp" / "step_000010"
    (newest / "trainer.json").write_text("{}")
    (newest / "optimizer").mkdir()
    found = to_hf.convert(tmp_path / "fsdp", tmp_path / "a", dtype="bfloat16")
    assert "trainer.json" not in names(found) and "optimizer" not in names(found)
    assert [str(difference) for difference in compare(newest, found, atol=0.05)] == []
    assert SafetensorsDir(found).tensors["model.norm.weight"].dtype == "BF16"

    directory = hf_to_torch_dist.convert(source, tmp_path / "td")
    directory.rename(tmp_path / "td" / "iter_0000007")
    (tmp_path / "td" / "latest_checkpointed_iteration.txt").write_text("7")
    for number, load in enumerate((tmp_path / "td", tmp_path / "td" / "iter_0000007", source)):
        assert not list(compare(source, to_hf.convert(load, tmp_path / f"b{number}")))
    with pytest.raises(MissingFile, match="--load: no checkpoint in"):
        to_hf.convert(tmp_path / "none", tmp_path / "c")
    where = ["--load", str(tmp_path / "td"), "--output-dir", str(tmp_path / "d")]
    assert main(["to-hf", *where, "--num-layers", "5"]) == 2
    assert "--num-layers 5: config.json says 3" in capsys.readouterr().err
    assert main(["to-hf", *where, "--tensor-model-parallel-sice", "5"]) == 2
    assert "did you mean --tensor-model-parallel-size?" in capsys.readouterr().err
    assert main(["to-hf", *where, "--num-layers", "3", "--tensor-model-parallel-size", "2"]) == 0


def test_a_config_of_an_unknown_type_needs_the_family_once(tmp_path: Path) -> None:
    source = hf_directory(tmp_path / "hf", QWEN3)
    (source / "config.json").write_text(json.dumps(QWEN3 | {"model_type": "novelty"}))
    with pytest.raises(NotAvailable, match="novelty"):
        hf_to_torch_dist.convert(source, tmp_path / "td")
    hf_to_torch_dist.convert(source, tmp_path / "td", model_name="qwen3")
    back = torch_dist_to_hf.convert(tmp_path / "td", tmp_path / "back")
    assert not list(compare(source, back))
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("kind", ["fsdp", "torch_dist"])
def test_to_hf_refuses_a_name_that_is_no_family_with_those_that_are(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = hf_directory(tmp_path / "hf", QWEN3)
    load = source if kind == "fsdp" else hf_to_torch_dist.convert(source, tmp_path / "td")
    words = ["to-hf", "--load", str(load), "--output-dir", str(tmp_path / "out"), "--model-name", "qwenn3"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "error: --model-name must be one of deepseek_v3, " in error and "got 'qwenn3'; did you mean qwen3?" in error
    assert not (tmp_path / "out").exists()
    assert main([*words[:-1], "Qwen3-4B"]) == 0
    assert main(["hf-to-torch-dist", "--hf-checkpoint", str(source), "--save", str(tmp_path / "x"), *words[-2:]]) == 2
    assert "error: --model-name must be one of" in capsys.readouterr().err


@pytest.mark.parametrize(("config", "name"), [(QWEN3, "minimax_m2"), (MINIMAX, "qwen3")])
def test_a_family_that_replaces_the_one_of_the_config_is_named(
    tmp_path: Path, config: dict[str, Any], name: str
) -> None:
    source = hf_directory(tmp_path / "hf", config)
    own = config["model_type"]
    with pytest.raises(ConfigError, match=f"^--model-name {name} replaces the model_type {own} of config.json: "):
        hf_to_torch_dist.convert(source, tmp_path / "td", model_name=name)
    # The family of the config may be named, too.
    with pytest.raises(ConfigError, match=r"^(?!.*--model-name)"):
        hf_to_torch_dist.convert(source, tmp_path / "td", model_name=own, megatron_args={"num_layers": 77})
