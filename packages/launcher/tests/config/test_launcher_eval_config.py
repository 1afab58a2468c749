"""`--eval-config`: each set has settings of its own, and an error names the file, the set and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.checks.plugins import check_plugins
from slime.launcher.config.eval_config import apply_eval_config
from slime.launcher.config.run_config import RunConfig
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, MissingFile, SlimeError

BASE = ["--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--num-rollout", "4"]


def parse(*words: str) -> RunConfig:
    return run_config.parse([*BASE, *words], check=False)


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


def test_an_unknown_reward_of_a_set_is_named_with_the_set(tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(EVAL.replace("rm_type: math", "rm_type: mth"))
    with pytest.raises(InvalidSetting, match="^--eval-config: greedy: --rm-type: unknown .* 'mth'; did you mean math"):
        check_plugins(parse("--eval-config", str(path)).flat)


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


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{name: "", path: x}', "expected a mapping with the texts name and path"),
        ('{name: a, path: " "}', "expected a mapping with the texts name and path"),
        ("{name: a, path: x, temprature: 1}", "a: unknown key 'temprature'; did you mean temperature?"),
        ("{name: a, path: x, temperature: hot}", "a.temperature must be a number, at least 0, got 'hot'"),
        ("{name: a, path: x, apply_chat_template_kwargs: {1: 2}}", "must be a mapping of arguments by name"),
        ("{name: a, path: x, multimodal_keys: {image: 3}}", "a.multimodal_keys: {'image': 3}"),
        ("{name: a, path: x, multimodal_keys: image}", "expected a mapping {image: COLUMN}"),
        ("{name: a, path: x, input_key: {a: b}}", "expected the name of a column"),
    ],
)
def test_an_error_names_the_file_and_the_place(tmp_path: Path, entry: str, message: str) -> None:
    path = tmp_path / "sets.yaml"
    path.write_text(f"eval: {{datasets: [{entry}]}}\n")
    with pytest.raises(SlimeError) as caught:
        apply_eval_config({"eval_config": path})
    assert str(caught.value).startswith(f"--eval-config {path}: ") and message in str(caught.value)
