"""The record of a run, and its warnings where nothing can be learned."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import yaml

from slime.launcher.config import run_config
from slime.launcher.config.record import write_record
from slime.launcher.metrics.silence import SilenceWatch
from slime.types import Sample
from slime.types.errors import OutOfSpace

WORDS = ["--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "2", "--n-samples-per-prompt", "2"]


def parse(*words: str, environment: dict[str, str] | None = None) -> run_config.RunConfig:
    return run_config.parse([*WORDS, *words], check=False, environment=environment or {})


@pytest.mark.parametrize(
    "words",
    [
        ["--lr", "1e-3", "--disable-rewards-normalization", "--rollout-stop", "a", "b c"],
        ["--eval-prompt-data", "one", "a.jsonl", "--eval-prompt-data", "two", "b.jsonl", "--eval-interval", "2"],
        ["--sglang-mem-fraction-static", "0.5", "--multimodal-keys", '{"image": "images"}', "--no-use-tensorboard"],
        ["--train-backend", "megatron", "--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--output-dir", "runs/one", "--load", "runs/zero/checkpoints", "--save-interval", "1"],
    ],
)
def test_the_settings_of_a_run_repeat_it(tmp_path: Path, words: list[str]) -> None:
    config = parse(*words, environment={"SLIME_ROLLOUT_BATCH_SIZE": "8"})
    write_record(tmp_path, config, ["slime", "train", *WORDS, *words])
    again = run_config.parse(["--config", str(tmp_path / "run.yaml"), "--output-dir", "x"], check=False, environment={})
    own = {"output_dir", "run_name", "checkpoint_dir"}
    assert {k: v for k, v in again.flat.items() if k not in own} == {
        k: v for k, v in config.flat.items() if k not in own
    }
    assert again.rollout.rollout_batch_size == 8
    # Whoever compares two runs sees the defaults of that time too.
    assert "# weight_decay:" in (tmp_path / "run.yaml").read_text()
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["hf_checkpoint"] == "m"


def test_commands_of_every_start_and_versions_are_kept(tmp_path: Path) -> None:
    for more in ([], ["--load", "my checkpoints"]):
        write_record(tmp_path, parse(*more), ["slime", "train", *WORDS, *more])
    lines = (tmp_path / "command.txt").read_text().splitlines()
    assert [line.startswith("# 20") for line in lines] == [True, False, True, False]
    assert lines[1].startswith("slime train --hf-checkpoint m") and lines[3].endswith("--load 'my checkpoints'")
    packages = json.loads((tmp_path / "versions.json").read_text())["packages"]
    assert packages["numpy"] and packages["torch"]


def sample(response: str, reward: float, prompt: str = "1+1=") -> Sample:
    return Sample(group_index=3, index=7, prompt=prompt, response=response, label="2", reward=reward)


EQUAL = {"rollout/zero_std_ratio": 1.0, "rollout/raw_reward": 0.0, "rollout/trained_tokens": 9.0}
MIXED = EQUAL | {"rollout/zero_std_ratio": 0.9}


def test_two_steps_without_a_gradient_are_told_once_with_a_sample(tmp_path: Path) -> None:
    watch, shown = SilenceWatch(), [sample("2<eos>", 0.0)]
    said = [watch.look(step, m, shown, tmp_path) for step, m in enumerate([EQUAL, MIXED, EQUAL, EQUAL, EQUAL, EQUAL])]
    assert [text is not None for text in said] == [False, False, False, True, False, False]
    for part in ("steps 2 to 3", "'1+1='", "'2<eos>'", "label     '2'", "reward    0.0", "slime show", "mean 0.000"):
        assert part in str(said[3])


def test_a_run_that_compares_nothing_is_not_told_of_equal_rewards_but_of_no_tokens(tmp_path: Path) -> None:
    watch = SilenceWatch(compares=False)
    assert [watch.look(step, EQUAL, [], tmp_path) for step in range(3)] == [None] * 3
    empty = EQUAL | {"rollout/trained_tokens": 0.0}
    said = [watch.look(step, empty, [], tmp_path) for step in range(3)]
    assert [text is not None for text in said] == [False, True, False] and "trained 0 tokens" in str(said[1])


def test_steps_without_a_gradient_are_told_whatever_the_reason(tmp_path: Path) -> None:
    # One sample of each group is left, so no group has two rewards to compare.
    silent = EQUAL | {"rollout/zero_std_ratio": 0.0, "train/grad_norm": 0.0, "rollout/failed_ratio": 0.5}
    watch = SilenceWatch()
    rows = [silent, silent | {"train/grad_norm": 1e-9}, silent, silent, silent]
    said = [watch.look(step, metrics, [sample("2", 1.0)], tmp_path) for step, metrics in enumerate(rows)]
    assert [text is not None for text in said] == [False, False, False, True, False]
    assert "steps 2 to 3 have no gradient: every advantage is 0" in str(said[3]) and "50% failed" in str(said[3])
    # Equal rewards are the better word for it.
    watch = SilenceWatch()
    told = [watch.look(step, EQUAL | {"train/grad_norm": 0.0}, [], tmp_path) for step in range(4)]
    assert [text is not None for text in told] == [False, True, False, False] and "the same reward" in str(told[1])


def test_a_disk_that_is_full_when_a_run_is_recorded_is_an_error_by_name(tmp_path: Path) -> None:
    (tmp_path / "command.txt").touch()
    os.truncate(tmp_path / "command.txt", 1 << 24)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit of files ends writes as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, limits[1]))
    try:
        with pytest.raises(OutOfSpace, match=r"--output-dir: .*command\.txt"):
            write_record(tmp_path, parse(), ["slime", "train"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
