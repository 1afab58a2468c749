"""Flags of SGLang on the command line of a run, sets of --eval-config, and --offload."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.catalogue import training_parser
from slime.launcher.config.run_config import RunConfig
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, MissingFile, NotAvailable, UnknownFlag

BASE = ["--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--num-rollout", "4"]


def parse(*words: str) -> RunConfig:
    return run_config.parse([*BASE, *words], check=False)


def test_flags_of_sglang_reach_the_rollout() -> None:
    config = parse(
        "--sglang-mem-fraction-static", "0.7", "--sglang-disable-cuda-graph", "--sglang-log-level=INFO",
        "--sglang-server-concurrency", "64", "--sglang-tp-size", "2",
    )  # fmt: skip
    assert config.rollout.sglang_args == {
        "mem_fraction_static": 0.7,
        "disable_cuda_graph": True,
        "log_level": "INFO",
    }
    assert config.rollout.sglang_server_concurrency == 64 and config.rollout.rollout_num_gpus_per_engine == 2
    assert config.flat["sglang_args"]["mem_fraction_static"] == 0.7


@pytest.mark.parametrize(
    "words, error, match",
    [
        (["--sglang-mem-fraction-statik", "0.7"], UnknownFlag, "did you mean --sglang-mem-fraction-static"),
        (["--sglang-mem-fraction-static", "most"], InvalidSetting, "--sglang-mem-fraction-static"),
        (["--sglang-model-path", "x"], InvalidSetting, "--hf-checkpoint"),
        (["--sglang-tensor-parallel-size", "2"], InvalidSetting, "--sglang-tensor-parallel-size cannot be set"),
        (["--sglang-tp", "2"], UnknownFlag, "unknown option --sglang-tp; did you mean --sglang-tp-size?"),
        (["--sglang-prot", "1"], UnknownFlag, "unknown option --sglang-prot; see --help"),
        (["--sglang-mem-fraction-static", "0.7", "--rollout-engine", "embedded"], InvalidSetting, "embedded"),
        (["--sglang-config", "x"], NotAvailable, "--sglang-config is not supported yet"),
        (["--sglang-router-ip=x"], NotAvailable, "--sglang-router-ip is not supported yet"),
    ],
)
def test_what_sglang_would_not_take_is_refused(words: list[str], error: type[ConfigError], match: str) -> None:
    with pytest.raises(error, match=match):
        parse(*words)


def test_files_and_flags_of_sglang_add_up(tmp_path: Path) -> None:
    config_file, custom = tmp_path / "config.yaml", tmp_path / "custom.yaml"
    config_file.write_text("sglang_mem_fraction_static: 0.5\nsglang-attention-backend: triton\n")
    custom.write_text("sglang_attention_backend: fa3\nmine: 1\n")
    config = parse("--config", str(config_file), "--sglang-mem-fraction-static", "0.6")
    assert config.rollout.sglang_args == {"mem_fraction_static": 0.6, "attention_backend": "triton"}
    config = parse("--config", str(config_file), "--custom-config-path", str(custom))
    assert config.rollout.sglang_args == {"mem_fraction_static": 0.5, "attention_backend": "fa3"}
    assert config.flat["mine"] == 1
    for text, error in (("sglang_mem_fraction_statik: 0.7", UnknownFlag), ("sglang_config: x", NotAvailable)):
        config_file.write_text(text)
        with pytest.raises(error):
            parse("--config", str(config_file))


def test_a_training_command_line_is_known_to_tools_too() -> None:
    assert "--sglang-mem-fraction-static" in training_parser().flag_names()


def test_offload_is_that_of_engines_and_trainer() -> None:
    config = parse("--offload")
    assert config.rollout.offload_rollout is config.trainer.offload_train is True
    assert parse("--colocate").rollout.offload_rollout is None and parse("--colocate").rollout.offloads
    for name in ("--no-offload-rollout", "--no-offload-train"):
        with pytest.raises(InvalidSetting, match=f"--offload and {name} cannot be used together"):
            parse("--offload", name)


EVAL = """
eval:
  defaults: {n_samples_per_eval_prompt: 8}
  datasets:
    - {name: sampled, path: held.jsonl, temperature: 1}
    - {name: greedy, path: held.jsonl, temperature: 0, n_samples_per_eval_prompt: 1, rm_type: math, label_key: answer}
"""


def test_eval_config_gives_each_set_its_own_settings(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(EVAL)
    config = parse("--eval-config", str(path), "--eval-interval", "2")
    assert config.evaluates and config.buffer.evaluation_sets() == {"sampled": "held.jsonl", "greedy": "held.jsonl"}
    assert config.rollout.eval_overrides == {
        "sampled": {"temperature": 1.0, "n_samples_per_eval_prompt": 8},
        "greedy": {"temperature": 0.0, "n_samples_per_eval_prompt": 1, "rm_type": "math"},
    }
    assert config.buffer.eval_columns == {"sampled": {}, "greedy": {"label_key": "answer"}}
    with pytest.raises(InvalidSetting, match="--eval-config and --eval-prompt-data cannot"):
        parse("--eval-config", str(path), "--eval-prompt-data", "a", "b")
    with pytest.raises(MissingFile, match="--eval-config"):
        parse("--eval-config", str(tmp_path / "none.yaml"))


def test_plugins_find_every_evaluation_set_with_its_name() -> None:
    assert parse("--eval-prompt-data", "held_out.jsonl").flat["eval_prompt_data"] == [["held_out", "held_out.jsonl"]]
    config = parse("--eval-prompt-data", "a", "x.jsonl", "--eval-prompt-data", "b", "y.jsonl")
    assert config.flat["eval_prompt_data"] == [["a", "x.jsonl"], ["b", "y.jsonl"]]
    assert parse().flat["eval_prompt_data"] is None


def test_eval_config_takes_a_mapping_by_name_and_every_key(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(
        "eval: {datasets: {plain: a.jsonl, other: {path: b.jsonl, multimodal_keys: {image: pictures}, "
        "repetition_penalty: 1.1, apply_chat_template: true, apply_chat_template_kwargs: {thinking: false}, "
        "metadata_overrides: {rm_type: math}, min_eval_samples: 3, skip_special_tokens: true}}}"
    )
    config = parse("--eval-config", str(path))
    assert config.buffer.evaluation_sets() == {"plain": "a.jsonl", "other": "b.jsonl"}
    assert config.buffer.eval_columns["other"] == {"multimodal_keys": {"image": "pictures"}}
    assert config.rollout.eval_overrides["other"] == {
        "repetition_penalty": 1.1, "apply_chat_template": True, "apply_chat_template_kwargs": {"thinking": False},
        "metadata_overrides": {"rm_type": "math"}, "min_eval_samples": 3, "skip_special_tokens": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text, error, match",
    [
        ("eval: {datasets: {a: 3}}", InvalidFile, "name and path"),
        ("eval: {datasets: {a: {path: p, multimodal_keys: x}}}", InvalidFile, "a.multimodal_keys: 'x'"),
        ("sets: []", InvalidFile, "one mapping: eval"),
        ("eval: {dataset: []}", InvalidFile, "datasets"),
        ("eval: {datasets: []}", InvalidFile, "a list of"),
        ("eval: {datasets: [{name: a}]}", InvalidFile, "name and path"),
        ("eval: {datasets: [{name: a, path: p}, {name: a, path: q}]}", InvalidFile, "'a' twice"),
        ("eval: {datasets: [{name: a, path: p, temprature: 1}]}", InvalidSetting, "did you mean temperature"),
        ("eval: {datasets: [{name: a, path: p, temperature: hot}]}", InvalidSetting, "a.temperature must be .*'hot'"),
        ("eval: {datasets: [{name: a, path: p, label_key: 3}]}", InvalidFile, "a.label_key: 3"),
        ("eval: {defaults: {top_p: 2}, datasets: [{name: a, path: p}]}", InvalidSetting, "defaults.top_p must be .*2"),
        ("eval: {datasets: [{name: a, path: p, n_samples_per_eval_prompt: 0}]}", InvalidSetting, "at least 1"),
    ],
)
def test_a_wrong_eval_config_says_where(tmp_path: Path, text: str, error: type[ConfigError], match: str) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    with pytest.raises(error, match=match):
        parse("--eval-config", str(path))
