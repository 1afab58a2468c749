"""Megatron's flags on the command line of a run: what they reach, and what they are held against."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from slime.converters.megatron.flags import committed, given
from slime.converters.megatron.model_scripts import model_config
from slime.launcher.config import run_config
from slime.launcher.config.advice import advice
from slime.launcher.config.catalogue import SETTINGS, declared
from slime.launcher.run_directory.checkpoints import (
    STATE_FILE,
    continued_step,
    find_checkpoint,
    has_checkpoint,
    prune,
)
from slime.launcher.run_directory.earlier_run import begins_anew, check_unused
from slime.types.directories import whole_directory
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, MissingFile, NotAvailable, UnknownFlag

# Small enough to read: 4 layers, 8 heads in 2 groups, 8 experts.
MODEL = model_config("qwen3-30B-A3B") | {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts": 8,
}


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer.json").write_text("{}")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1 + 1"}\n')
    return ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--num-rollout", "4",
            "--n-samples-per-prompt", "2"]  # fmt: skip


@pytest.fixture
def megatron(base: list[str]) -> list[str]:
    return [*base, "--train-backend", "megatron"]


def test_megatrons_flags_reach_the_trainer_and_plug_ins(megatron: list[str]) -> None:
    config = run_config.parse(
        [*megatron, *"--tensor-model-parallel-size 2 --no-rope-fusion --attention-dropout 0".split()]
    )
    assert given(config.megatron) == {
        "tensor_model_parallel_size": 2,
        "apply_rope_fusion": False,
        "attention_dropout": 0.0,
    }
    assert config.flat["tensor_model_parallel_size"] == 2 and config.flat["apply_rope_fusion"] is False
    assert config.flat["context_parallel_size"] == 1, "Megatron's default where nothing was given"
    assert config.launcher.actor_num_gpus_per_node == 2
    assert pickle.loads(pickle.dumps(config.megatron)) == config.megatron  # it goes to another process


def test_a_name_belongs_to_megatron_or_to_us(megatron: list[str]) -> None:
    ours = {name for package, cls in SETTINGS.items() if package != "megatron" for name in cls.__dataclass_fields__}
    for row in committed():
        assert (row.dest in ours) == (row.status == "elsewhere") or row.status == "refused", row.dest
        if row.status == "refused":
            assert not set(row.flags) & {flag.spelling for flag in declared().values()}, row.flags


def test_model_args_of_a_script_are_taken_as_they_are(base: list[str], tmp_path: Path) -> None:
    from slime.converters.megatron.model_scripts import model_flags

    config = run_config.parse([*base, "--train-backend", "megatron", *model_flags(MODEL)])
    assert config.trainer.bf16 and given(config.megatron)["num_experts"] == 8


def test_megatrons_flags_in_a_config_file(megatron: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "tensor_model_parallel_size: 2\nno-rope-fusion: true\nadd_bias_linear: false\nmoe_layer_freq: '[1]*4'\n"
        "swiglu: true\nsequence-parallel: true\n"
    )
    values = given(run_config.parse([*megatron, "--config", str(path)]).megatron)
    assert values == {
        "tensor_model_parallel_size": 2,
        "apply_rope_fusion": False,
        "add_bias_linear": False,
        "moe_layer_freq": [1, 1, 1, 1],
        "swiglu": True,
        "sequence_parallel": True,
    }
    path.write_text("fp4_format: e2m1\n")
    with pytest.raises(NotAvailable, match="--fp4-format"):
        run_config.parse([*megatron, "--config", str(path)])


@pytest.mark.parametrize(
    "extra, error, words",
    [
        (
            "--tensor-model-parralel-size 2",
            UnknownFlag,
            ["--tensor-model-parralel-size", "--tensor-model-parallel-size"],
        ),
        ("--fp4-format e2m1", NotAvailable, ["--fp4-format is not supported yet: "]),
        ("--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather", NotAvailable, ["weights stay in bfloat16"]),
        ("--data-path x", NotAvailable, ["--data-path", "--prompt-data"]),
        ("--hidden-dropout 0.1", NotAvailable, ["--hidden-dropout 0.1"]),
        ("--hidden-size 4096", InvalidSetting, ["--hidden-size 4096", "2048", "--hf-checkpoint", "hidden_size"]),
        ("--model-type qwen3-4B", InvalidSetting, ["--model-type qwen3-4B", "--hidden-size 2560", "2048"]),
        ("--model-type qwen3-5B", InvalidSetting, ["--model-type", "did you mean"]),
        ("--model-name gpt2", InvalidSetting, ["--model-name must be one of deepseek_v3, ", "got 'gpt2'"]),
        (
            "--tensor-model-parallel-size 2 --context-parallel-size 2 --actor-num-gpus-per-node 6",
            InvalidSetting,
            ["--tensor-model-parallel-size 2 x --context-parallel-size 2 = 4, got 6"],
        ),
        (
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --actor-num-gpus-per-node 2",
            InvalidSetting,
            ["--expert-tensor-parallel-size 2 x --expert-model-parallel-size 2 = 4, got 2"],
        ),
        (
            "--tensor-model-parallel-size 3",
            InvalidSetting,
            ["--tensor-model-parallel-size must be a divisor of", "8 attention heads, got 3"],
        ),
        (
            "--expert-model-parallel-size 3",
            InvalidSetting,
            ["--expert-model-parallel-size must be a divisor of", "8 experts, got 3"],
        ),
        (
            "--pipeline-model-parallel-size 3",
            InvalidSetting,
            ["--pipeline-model-parallel-size must be a divisor of", "4 layers, got 3"],
        ),
        ("--only-train-params-name-list a --freeze-params-name-list b", InvalidSetting, ["--only-train", "--freeze"]),
        ("--freeze-params-name-list (", InvalidSetting, ["--freeze-params-name-list", "'('"]),
        ("--save-keep 2", InvalidSetting, ["--save-keep 2", "--save-interval"]),
        ("--ckpt-step 2", InvalidSetting, ["--ckpt-step 2", "--load"]),
    ],
)
def test_what_does_not_fit_is_named_before_anything_starts(
    megatron: list[str], extra: str, error: type[ConfigError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        run_config.parse([*megatron, *extra.split()])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        "--tensor-model-parallel-size 2",
        "--no-rope-fusion",
        "--fp8-format e4m3 --fp8-recipe blockwise",
        "--fp8-format e4m3",
        "--async-save --save-interval 1",
        "--enable-mtp-training",
        "--freeze-params-name-list embedding",
        "--custom-megatron-init-path a.b",
        "--model-name qwen3",
        "--initial-megatron-checkpoint {model}",
    ],
)
def test_another_backend_takes_none_of_it(base: list[str], extra: str) -> None:
    words = extra.format(model=base[1]).split()
    with pytest.raises(InvalidSetting, match=f"{words[0]}.*requires --train-backend megatron"):
        run_config.parse([*base, "--train-backend", "fsdp", *words])


def test_a_flag_of_megatrons_names_the_backend(base: list[str]) -> None:
    assert run_config.parse([*base, "--tensor-model-parallel-size", "2"]).trainer.train_backend == "megatron"
    assert run_config.parse([*base, "--megatron-to-hf-mode", "raw"]).launcher.train_backend == "megatron"
    assert run_config.parse([*base, "--bf16"]).trainer.train_backend == "fsdp", "a flag that both have names none"


def test_a_known_model_is_held_against_the_checkpoint_for_any_backend(base: list[str]) -> None:
    Path(base[1], "config.json").write_text(json.dumps(model_config("qwen3-4B")))
    assert run_config.parse([*base, "--model-type", "QWEN3-4b"]).launcher.model_type
    with pytest.raises(InvalidSetting, match="--model-type qwen3-8B"):
        run_config.parse([*base, "--model-type", "qwen3-8B"])


def test_hooks_are_held_to_their_contracts(megatron: list[str], tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("def init(args): pass\n\ndef other(): pass\n")
    assert run_config.parse([*megatron, "--custom-megatron-init-path", f"{tmp_path}/hooks.py:init"])
    with pytest.raises(ConfigError, match="--custom-megatron-before-train-step-hook-path"):
        run_config.parse([*megatron, "--custom-megatron-before-train-step-hook-path", f"{tmp_path}/hooks.py:other"])


def test_a_loss_function_that_takes_logits_needs_a_rank_with_the_whole_vocabulary(
    megatron: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "def a(args, batch, sum_of_sample_mean): ...\ndef b(args, batch, logits, sum_of_sample_mean): ...\n"
    )
    words = [*megatron, "--loss-type", "custom_loss", "--custom-loss-function-path"]
    run_config.parse([*words, f"{file}:a", "--tensor-model-parallel-size", "2"])
    run_config.parse([*words, f"{file}:b"])
    with pytest.raises(NotAvailable, match="losses.py:b with --tensor-model-parallel-size 2 is not supported yet"):
        run_config.parse([*words, f"{file}:b", "--tensor-model-parallel-size", "2"])


def checkpoint(directory: Path) -> Path:
    with whole_directory(directory, "test") as partial:
        (partial / STATE_FILE).write_text("{}")
    return directory


def test_where_the_weights_come_from(megatron: list[str], tmp_path: Path) -> None:
    initial, run = tmp_path / "initial", tmp_path / "run"
    initial.mkdir()
    (initial / "latest_checkpointed_iteration.txt").write_text("release")
    with pytest.raises(MissingFile, match=r"release: no \.metadata"):
        run_config.parse([*megatron, "--load", str(initial)])
    (initial / "release").mkdir()
    (initial / "release" / ".metadata").touch()
    run.mkdir()
    both = ["--initial-megatron-checkpoint", str(initial), "--load", str(run)]
    assert run_config.parse([*megatron, *both[:2]]).trainer.load == str(initial)
    assert run_config.parse([*megatron, *both]).trainer.load == str(initial), "nothing to resume yet"
    checkpoint(run / "iter_0000001")
    newest = checkpoint(run / "iter_0000003")
    assert run_config.parse([*megatron, *both]).trainer.load == str(newest)
    assert run_config.parse([*megatron, *both, "--ckpt-step", "1"]).trainer.load == str(run / "iter_0000001")
    with pytest.raises(MissingFile, match=r"--load: no checkpoint of step 2 in .*steps there: 1, 3"):
        run_config.parse([*megatron, *both, "--ckpt-step", "2"])
    with pytest.raises(MissingFile, match="--initial-megatron-checkpoint"):
        run_config.parse([*megatron, "--initial-megatron-checkpoint", str(tmp_path / "none")])
    with pytest.raises(MissingFile, match=r"none holds no checkpoint: .* continued later, give --save the same dir"):
        run_config.parse([*megatron, "--load", str(tmp_path / "none")])


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A converted model."""
    directory = tmp_path / "reference"
    (directory / "release").mkdir(parents=True)
    (directory / "release" / ".metadata").touch()
    (directory / "latest_checkpointed_iteration.txt").write_text("release")
    return directory


def test_a_run_that_finds_nothing_in_load_begins_with_the_reference(
    megatron: list[str], tmp_path: Path, reference: Path
) -> None:
    load, save = tmp_path / "load", tmp_path / "save"
    words = [*megatron, "--load", str(load), "--ref-load", str(reference), "--output-dir", str(tmp_path / "out")]
    words += ["--save-interval", "2"]
    begins = (
        f"--load {load}: no checkpoint yet, training starts from the beginning, with the weights of {reference} and"
    )
    for _ in ("missing", "empty"):
        config = run_config.parse([*words, "--save", str(save)])
        assert config.trainer.load == str(reference) and continued_step(config.trainer.load, None) is None
        assert begins_anew(config) == f"{begins} a new optimizer; to resume this run later, give it --load {save}"
        assert not any("--ref-load" in sentence for sentence in advice(config))
        same = run_config.parse([*words, "--save", str(load)])
        assert same.trainer.load == str(reference) and begins_anew(same) == f"{begins} a new optimizer"
        load.mkdir(exist_ok=True)
        (load / ".nfs1").touch()
    # A run that finished and left nothing to load is not written over.
    check_unused(same)
    (tmp_path / "out" / "model").mkdir(parents=True)
    with pytest.raises(InvalidSetting, match="an earlier run left model"):
        check_unused(same)
    newest = checkpoint(load / "iter_0000003")
    resumed = run_config.parse([*words, "--save", str(load)])
    assert resumed.trainer.load == str(newest) and begins_anew(resumed) is None
    assert any(sentence.startswith(f"--ref-load {reference} has no effect") for sentence in advice(resumed))


def test_nothing_in_load_is_an_error_without_a_reference_and_beside_other_files(
    megatron: list[str], tmp_path: Path, reference: Path
) -> None:
    load, run = tmp_path / "load", tmp_path / "run"
    words, both = [*megatron, "--load", str(load)], ["--ref-load", str(reference)]
    with pytest.raises(MissingFile, match=f"--load {load} holds no checkpoint: .* as --ref-load"):
        run_config.parse(words)
    with pytest.raises(MissingFile, match="or with --train-backend megatron the first weights as --ref-load"):
        run_config.parse([*words, *both, "--train-backend", "fsdp"])
    with pytest.raises(MissingFile, match=f"--ref-load {tmp_path}/refrence holds no checkpoint"):
        run_config.parse([*words, "--ref-load", f"{tmp_path}/refrence"])
    with pytest.raises(MissingFile, match="--load: no checkpoint of step 2"):
        run_config.parse([*words, *both, "--ckpt-step", "2"])
    # The reference of a run that goes on would be continued itself.
    checkpoint(run / "iter_0000001")
    with pytest.raises(MissingFile, match=f"--load {load} holds no checkpoint"):
        run_config.parse([*words, "--ref-load", str(run)])
    load.mkdir()
    (load / "notes.txt").touch()
    with pytest.raises(MissingFile, match=f"--load {load} holds no checkpoint"):
        run_config.parse([*words, *both])
    (load / "notes.txt").unlink()
    with pytest.raises(MissingFile, match=f"--load {load} holds no checkpoint: .* as --ref-load"):
        run_config.parse(words)
    assert run_config.parse([*words, *both]).trainer.load == str(reference)
    load.rmdir()
    load.touch()
    with pytest.raises(MissingFile, match="--load"):
        run_config.parse([*words, *both])


@pytest.mark.parametrize("flag", ["--load", "--ref-load", "--critic-load"])
def test_a_checkpoint_of_megatrons_is_held_against_the_model(megatron: list[str], tmp_path: Path, flag: str) -> None:
    saved = tmp_path / "saved" / "release"
    (saved / "hf").mkdir(parents=True)
    (saved / ".metadata").touch()
    (saved.parent / "latest_checkpointed_iteration.txt").write_text("release")
    (saved / "hf" / "config.json").write_text(json.dumps(MODEL))
    if flag == "--critic-load":
        megatron = [*megatron, "--advantage-estimator", "ppo"]
    trainer = run_config.parse([*megatron, flag, str(saved.parent)]).trainer
    assert str(saved.parent) in (trainer.load, trainer.ref_load, trainer.critic_load)
    (saved / "hf" / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 5, "hidden_size": 1024}))
    with pytest.raises(InvalidSetting, match=rf"by the checkpoint of {flag}") as caught:
        run_config.parse([*megatron, flag, str(saved.parent)])
    assert "--num-layers 5: config.json says 4" in str(caught.value)
    assert "--hidden-size 1024: config.json says 2048" in str(caught.value)


def test_the_reference_of_another_backend_is_a_hugging_face_directory(base: list[str], tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    with pytest.raises(InvalidFile, match=r"--ref-load: .* has no config\.json"):
        run_config.parse([*base, "--train-backend", "fsdp", "--ref-load", str(tmp_path)])


def test_old_checkpoints_go_and_incomplete_ones_do_not_count(tmp_path: Path) -> None:
    for step in range(6):
        checkpoint(tmp_path / f"iter_{step:07d}")
    (tmp_path / "iter_0000006").mkdir()  # being written
    assert prune(tmp_path, keep=None, retain_interval=None) == []
    assert [path.name for path in prune(tmp_path, keep=3, retain_interval=2)] == ["iter_0000000", "iter_0000002"]
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["1", "3", "4", "5", "6"]
    prune(tmp_path, keep=None, retain_interval=4)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["3", "5", "6"]
    prune(tmp_path, keep=1, retain_interval=None)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["5", "6"]
    assert has_checkpoint(str(tmp_path)) and find_checkpoint(str(tmp_path)).endswith("iter_0000005")


def test_help_is_short_and_help_megatron_lists_the_flags() -> None:
    def show(flag: str) -> str:
        command = [sys.executable, "-m", "slime.launcher.cli", "train", flag]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    short = show("--help")
    assert "--help-megatron" in short and "--tensor-model-parallel-size" not in short
    long = show("--help-megatron")
    assert "--tensor-model-parallel-size" in long and "--disable-bias-linear" in long
    assert "--rollout-batch-size" not in long
