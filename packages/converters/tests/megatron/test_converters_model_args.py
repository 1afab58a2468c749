"""A model's arguments: from MODEL_ARGS, from its config, held against each other, and as scripts/models/*.sh."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime.converters import cli
from slime.converters.families import find_family
from slime.converters.megatron.args import (
    MODEL,
    check_model_args,
    model_args,
    padded_vocab_size,
    parse_model_args,
    read_model_config,
    render_flags,
)
from slime.converters.megatron.flags import by_dest
from slime.converters.megatron.model_scripts import known_script, model_config, model_flags, model_names, read_script
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable

SCRIPTS = Path(__file__).parents[4] / "scripts" / "models"
# As the seed prints it for a Qwen3-4B; four of its values are not that model's.
SEED = """
export MODEL_ARGS=(
--num-layers 36
--hidden-size 2560
--num-attention-heads 20
--num-query-groups 4
--ffn-hidden-size 6912
--max-position-embeddings 32768
--rotary-percent 1.0
--rotary-base 1000000
--swiglu
--untie-embeddings-and-output-weights
--no-position-embedding
--normalization RMSNorm
--tokenizer-type HuggingFaceTokenizer
--bf16
)
"""


def test_the_scripts_are_those_of_the_known_models() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == set(model_names())
    for name in model_names():
        text = (SCRIPTS / f"{name}.sh").read_text()
        assert text == known_script(name), (
            f"run: slime-convert model-args --model-type {name} --output {SCRIPTS}/{name}.sh"
        )


@pytest.mark.parametrize("name", model_names())
def test_bash_reads_the_words_of_a_script(name: str) -> None:
    config = model_config(name)
    words = read_script(SCRIPTS / f"{name}.sh")
    assert words == model_flags(config)
    values, rest = parse_model_args(words)
    assert rest == [] and values["bf16"] is True
    check_model_args(values, config)
    family = find_family(config).arguments(config)
    assert {key: value for key, value in values.items() if key in family} == family


def test_a_script_takes_its_directories_from_the_environment(tmp_path: Path) -> None:
    show = f'source "{SCRIPTS}/qwen3-4B.sh"; printf "%s\\n" "${{CKPT_ARGS[@]}}"'
    environment = {"PATH": os.environ["PATH"]}

    def run(**more: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", show], env=environment | more, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout.splitlines()

    assert run() == ["--hf-checkpoint", "Qwen3-4B"]
    assert run(HF_CHECKPOINT="/a b", MEGATRON_CHECKPOINT="/c d") == [
        "--hf-checkpoint", "/a b", "--initial-megatron-checkpoint", "/c d",
    ]  # fmt: skip


def test_a_known_model_is_found_in_any_case_and_the_nearest_is_named() -> None:
    assert model_config("QWEN3-4b") == model_config("qwen3-4B.sh")
    with pytest.raises(InvalidSetting, match="--model-type must be one of .*, got 'qwen3-5B'; did you mean qwen3"):
        model_config("qwen3-5B")


def test_every_contradiction_is_named_with_both_values_and_the_key(tmp_path: Path) -> None:
    path = tmp_path / "seed.sh"
    path.write_text(SEED)
    values, _ = parse_model_args(read_script(path))
    with pytest.raises(InvalidSetting) as caught:
        check_model_args(values, model_config("qwen3-4B"), source="here")
    assert str(caught.value).splitlines() == [
        "4 of the model's flags differ from here:",
        "  --ffn-hidden-size 6912: config.json says 9728 (intermediate_size = 9728)",
        "  --num-attention-heads 20: config.json says 32 (num_attention_heads = 32)",
        "  --num-query-groups 4: config.json says 8 (num_key_value_heads = 8)",
        "  --untie-embeddings-and-output-weights: config.json says no --untie-embeddings-and-output-weights "
        "(tie_word_embeddings = True)",
    ]


@pytest.mark.parametrize(
    "name, flags",
    [
        ("qwen3-4B", "--rotary-base 1e6 --norm-epsilon 0.000001 --kv-channels 128 --max-position-embeddings 4096"),
        ("qwen3-4B", "--tensor-model-parallel-size 2 --seq-length 100 --recompute-activations --optimizer sgd"),
        ("qwen2.5-0.5B", "--kv-channels 64 --num-query-groups 2 --padded-vocab-size 152064"),
        ("qwen3-30B-A3B", "--moe-layer-freq [1]*48 --moe-router-score-function softmax --moe-aux-loss-coeff 0.1"),
        # As other scripts for these models have them.
        ("moonlight", "--moe-router-num-groups 1 --moe-router-group-topk 1 --moe-router-pre-softmax --kv-channels 128"),
        ("glm4.7-30B-A3B", "--add-qkv-bias --kv-channels 192 --num-query-groups 20 --make-vocab-size-divisible-by 64"),
        (
            "glm5-744B-A40B",
            "--spec slime_plugins.models.glm5.glm5 get_glm5_spec --allgather-cp --enable-experimental --freeze-indexer "
            "--kv-channels 192 --moe-router-pre-softmax --make-vocab-size-divisible-by 16",
        ),
        (
            "minimax-m2",
            "--spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec --qk-layernorm --moe-layer-freq [1]*62 "
            "--moe-router-pre-softmax --rotary-percent 0.5 --norm-epsilon 1e-6",
        ),
        ("glm4.5-106B-A12B", "--moe-layer-freq [0]*1+[1]*45 --moe-router-topk-scaling-factor 1.0 --mtp-num-layers 1"),
        ("deepseek-v3", "--mtp-num-layers 0 --num-query-groups 128 --rotary-scaling-factor 40 --beta-fast 32"),
    ],
)
def test_what_agrees_or_describes_no_model_passes(name: str, flags: str) -> None:
    check_model_args(parse_model_args(flags.split())[0], model_config(name))


@pytest.mark.parametrize(
    "name, flags, words",
    [
        ("qwen3-4B", "--num-experts 8", ["--num-experts 8", "none"]),
        ("qwen3-4B", "--add-qkv-bias", ["--add-qkv-bias", "no --add-qkv-bias", "attention_bias = False"]),
        ("qwen3-4B", "--rotary-base 10000", ["--rotary-base 10000", "1000000", "rope_theta"]),
        ("qwen3-4B", "--max-position-embeddings 99999", ["--max-position-embeddings 99999", "40960"]),
        ("qwen3-4B", "--padded-vocab-size 1000", ["--padded-vocab-size 1000", "151936"]),
        ("qwen3-4B", "--multi-latent-attention", ["--multi-latent-attention"]),
        ("qwen3-4B", "--qk-layernorm-across-heads", ["--qk-layernorm-across-heads", "no --qk-layernorm-across-heads"]),
        ("glm5-744B-A40B", "--dsa-indexer-topk 512", ["--dsa-indexer-topk 512", "2048", "index_topk = 2048"]),
        ("minimax-m2", "--rotary-percent 1.0", ["--rotary-percent 1.0", "0.5", "rotary_dim = 64"]),
        ("llama3.1-8B", "--rope-scaling-factor 32", ["--rope-scaling-factor 32", "8.0"]),
        ("qwen3-30B-A3B", "--moe-layer-freq [0]+[1]*47", ["--moe-layer-freq [0]+[1]*47", "[1]*48"]),
        (
            "glm4-9B",
            "--kv-channels 64 --rotary-percent 1.0",
            ["--kv-channels 64", "128", "--rotary-percent 1.0", "0.5"],
        ),
        ("deepseek-v3", "--q-lora-rank 8 --mtp-num-layers 2", ["--q-lora-rank 8", "1536", "--mtp-num-layers 2"]),
    ],
)
def test_what_contradicts_does_not(name: str, flags: str, words: list[str]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        check_model_args(parse_model_args(flags.split())[0], model_config(name))
    for word in words:
        assert word in str(caught.value)


def test_the_rest_of_a_command_line_is_handed_back_and_refused_flags_are_not() -> None:
    values, rest = parse_model_args("--swiglu --hf-checkpoint D --num-layers 2 --save S extra".split())
    assert values == {"swiglu": True, "num_layers": 2}
    assert rest == ["--hf-checkpoint", "D", "--save", "S", "extra"]
    with pytest.raises(NotAvailable, match="--fp4-format is not supported yet: "):
        parse_model_args(["--fp4-format", "e2m1"])


def test_arguments_are_the_familys_overlaid_with_what_was_given() -> None:
    config = model_config("qwen3-4B")
    args = model_args(config, {"tensor_model_parallel_size": 2, "vocab_size": 151936, "recompute_activations": True})
    assert args["num_layers"] == 36 and args["tensor_model_parallel_size"] == 2
    assert args["recompute_granularity"] == "selective" and "recompute_activations" not in args


def test_arguments_become_flags_and_back() -> None:
    for name in ("glm4.5-355B-A32B", "kimi-k2", "llama3.2-1B"):
        config = model_config(name)
        args = find_family(config).arguments(config) | {"recompute_modules": ["mlp", "moe"], "apply_rope_fusion": False}
        assert parse_model_args(render_flags(args)) == (args, [])
    with pytest.raises(InvalidSetting, match="hidden_sise"):
        render_flags({"hidden_sise": 3})


def test_every_argument_that_describes_a_model_has_a_flag() -> None:
    assert set(MODEL) <= set(by_dest())
    used = {key for name in model_names() for key in find_family(model_config(name)).arguments(model_config(name))}
    # Flags of training, not of the model.
    assert used - set(MODEL) == {"position_embedding_type", "moe_router_dtype", "moe_router_bias_update_rate"}


@pytest.mark.parametrize(
    "args, rows",
    [
        ({"vocab_size": 151936}, 151936),
        ({"vocab_size": 1000}, 1024),
        ({"vocab_size": 1025, "tensor_model_parallel_size": 2}, 1280),
        ({"vocab_size": 1000, "make_vocab_size_divisible_by": 1, "tensor_model_parallel_size": 3}, 1002),
        ({"vocab_size": 1000, "padded_vocab_size": 1004, "tensor_model_parallel_size": 4}, 1004),
    ],
)
def test_rows_of_the_padded_vocabulary(args: dict[str, Any], rows: int) -> None:
    assert padded_vocab_size(args) == rows


@pytest.mark.parametrize(
    "args, words",
    [
        (
            {"padded_vocab_size": 1001, "tensor_model_parallel_size": 2},
            "--padded-vocab-size must be a multiple of --tensor-model-parallel-size 2, got 1001",
        ),
        ({"padded_vocab_size": 10, "vocab_size": 11}, "--padded-vocab-size must be at least --vocab-size 11, got 10"),
        ({}, "--vocab-size"),
    ],
)
def test_a_wrong_padding_is_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        padded_vocab_size(args)


def test_the_command_makes_a_script_from_a_config_and_holds_others_against_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_config("qwen3-0.6B") | {"num_hidden_layers": 3}))
    made = tmp_path / "made.sh"
    assert cli.main(["model-args", "--hf-checkpoint", str(model), "--output", str(made)]) == 0
    assert "--num-layers 3" in made.read_text() and str(model) in made.read_text()
    assert cli.main(["model-args", "--hf-checkpoint", str(model), "--check", str(made)]) == 0
    assert "agrees with" in capsys.readouterr().out
    assert cli.main(["model-args", "--model-type", "qwen3-0.6b", "--check", str(made)]) == 1
    assert "--num-layers 3: config.json says 28" in capsys.readouterr().err
    assert cli.main(["model-args", "--model-type", "qwen3-0.6b"]) == 0
    assert capsys.readouterr().out == (SCRIPTS / "qwen3-0.6B.sh").read_text()
    assert cli.main(["model-args", "--model-type", "qwen3-0.6b", "--output", str(made)]) == 0
    assert made.read_text() == (SCRIPTS / "qwen3-0.6B.sh").read_text()
    link, notes = tmp_path / "link", tmp_path / "notes.txt"
    notes.write_text("precious")
    link.symlink_to(notes)
    for path in (link, notes):
        assert cli.main(["model-args", "--model-type", "qwen3-0.6b", "--output", str(path)]) == 2
    assert notes.read_text() == "precious" and link.is_symlink()
    assert "--output: " in (error := capsys.readouterr().err) and "notes.txt is not a script of a model" in error
    for wrong in (
        [],
        ["--model-type", "none"],
        ["--model-type", "qwen3-0.6B", "--hf-checkpoint", str(model)],
        ["--model-type", "qwen3-0.6B", "--check", str(made), "--output", "x"],
        ["--model-type", "qwen3-0.6B", "--check", str(tmp_path / "none.sh")],
        ["--hf-checkpoint", str(tmp_path)],
    ):
        assert cli.main(["model-args", *wrong]) == 2, wrong
    made.write_text("MODEL_ARGS=(--hidden-sise 3)")
    assert cli.main(["model-args", "--model-type", "qwen3-0.6b", "--check", str(made)]) == 1
    assert "unknown flag of Megatron --hidden-sise; did you mean --hidden-size?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "sets no MODEL_ARGS"),
        ("MODEL_ARGS=(", "unexpected EOF"),
        ("exit 3", "bash ended with exit code 3"),
        ("MODEL_ARGS=()", "sets no MODEL_ARGS"),
    ],
)
def test_a_file_without_model_args_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "x.sh").write_text(text)
    with pytest.raises(InvalidFile, match=rf"x\.sh.*{reason}"):
        read_script(tmp_path / "x.sh")
    with pytest.raises(MissingFile, match="none.sh"):
        read_script(tmp_path / "none.sh")


def test_a_model_name_picks_the_family(tmp_path: Path) -> None:
    config = model_config("qwen3-4B")
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    assert read_model_config(tmp_path)["model_type"] == "mine"
    assert read_model_config(tmp_path, "qwen3")["model_type"] == "qwen3"
    assert read_model_config(tmp_path, "Qwen3-4B")["model_type"] == "qwen3"
    for name, near in (("gpt2", ""), ("", ""), ("qwen9", "; did you mean qwen2?"), ("lama", "; did you mean llama?")):
        said = rf"^--model-name must be one of deepseek_v3, glm4, .*, qwen3_vl, got '{name}'{re.escape(near)}$"
        with pytest.raises(InvalidSetting, match=said):
            read_model_config(tmp_path, name)
