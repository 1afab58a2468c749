"""The tiny quickstart through real Ray, gRPC, HTTP and weight sync, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.launcher.run_directory.kept_samples import kept_files, read_rows
from slime.launcher.show.checks import Rules, run_checks
from tiny_runs import evaluations, metrics, run, timeless

WEIGHTS = "model/model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    output_dir = tmp_path_factory.mktemp("tiny")
    yield output_dir, run(output_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps, which others continue or vary. Its steps are the first of a longer run."""
    output_dir = tmp_path_factory.mktemp("whole")
    run(output_dir, "--num-rollout", "4", "--save-interval", "2")
    return output_dir


def test_the_tiny_model_learns_to_reverse_digits(trained: tuple[Path, str]) -> None:
    output_dir, output = trained
    rewards = [row["rollout/raw_reward"] for row in metrics(output_dir)]
    assert sum(rewards[-3:]) / 3 > 0.9, output
    assert sum(rewards[:3]) / 3 < 0.4
    evaluation = json.loads((output_dir / "eval.json").read_text())
    assert evaluation["before"] < 0.4 and evaluation["after"] > 0.9


def test_a_run_leaves_what_it_says(trained: tuple[Path, str]) -> None:
    output_dir, output = trained
    assert (output_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((output_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert (output_dir / "model" / "model.safetensors").exists() and (output_dir / "model" / "tokenizer.json").exists()
    for key in ("rollout/raw_reward", "train/loss", "train/grad_norm", "perf/rollout_time", "perf/train_time"):
        assert all(key in row for row in metrics(output_dir)), key
    for words in ("reward.png", "metrics.jsonl", "trained model", "try next", "held-out evaluation"):
        assert words in output


def test_the_engines_hold_the_weights_of_each_step(trained: tuple[Path, str]) -> None:
    output_dir, _ = trained
    for row in metrics(output_dir):
        assert row["rollout/weight_version_min"] == row["rollout/weight_version_max"] == row["step"]


def test_a_run_keeps_samples_whose_log_probs_agree_and_in_which_no_check_finds_a_fault(
    trained: tuple[Path, str],
) -> None:
    output_dir, _ = trained
    state = json.loads((output_dir / "state.json").read_text())
    files = kept_files(output_dir)
    assert state["state"] == "done" and state["num_steps"] == len([f for f in files if not f.evaluation])
    rows = [row for file in files if not file.evaluation for row in read_rows(file.path)]
    scored = [row for row in rows if row["trainer_log_probs"] is not None]
    # Groups with equal rewards are skipped: at the end that is most of them.
    assert len(scored) > len(rows) / 10
    for row in scored:
        assert row["trainer_log_probs"] == pytest.approx(row["engine_log_probs"], abs=1e-4)
    assert {row["dataset"] for file in files if file.evaluation for row in read_rows(file.path)} == {"reverse"}
    for file in files:
        assert run_checks(read_rows(file.path), Rules()) == []


def test_two_deterministic_runs_have_the_same_metrics(trained: tuple[Path, str], whole: Path) -> None:
    longer, _ = trained
    rows = timeless(metrics(whole))
    assert len(rows) == 4
    assert timeless(metrics(longer)[:4]) == rows
    assert [row["step"] for row in evaluations(whole)] == [0, 4]
    assert timeless(evaluations(longer))[0] == timeless(evaluations(whole))[0]


def test_two_trainer_ranks_train_like_one(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--num-rollout", "2", "--actor-num-gpus-per-node", "2")
    for a, b in zip(metrics(whole)[:2], metrics(tmp_path), strict=True):
        assert a["rollout/raw_reward"] == pytest.approx(b["rollout/raw_reward"], abs=0.02)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--num-rollout", "4", "--load", str(whole / "checkpoints" / "step_000001"))
    assert timeless(metrics(whole))[2:] == timeless(metrics(tmp_path))
    assert (tmp_path / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert [row["step"] for row in evaluations(tmp_path)][-1] == 4
    assert timeless(evaluations(tmp_path))[-1] == timeless(evaluations(whole))[-1]


def test_engines_that_release_their_memory_serve_again_with_the_next_weights(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, "--num-rollout", "2", "--offload")
    assert timeless(metrics(whole))[:2] == timeless(metrics(tmp_path))
    for row in metrics(tmp_path):
        assert row["perf/offload_time"] > 0 and row["perf/onload_time"] > 0


def test_an_evaluation_alone_leaves_no_copy_of_the_model(tmp_path: Path) -> None:
    output = run(tmp_path, "--num-rollout", "0")
    assert [row["step"] for row in evaluations(tmp_path)] == [0] and not metrics(tmp_path)
    assert not (tmp_path / "model").exists() and "trained model" not in output
