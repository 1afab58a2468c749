"""What a run prints and writes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from slime.launcher.metrics import files
from slime.launcher.metrics.report import Report, evaluation_scores
from slime.types import Sample
from slime.types.errors import OutOfSpace


def report(directory: Path, num_steps: int = 2) -> tuple[Report, io.StringIO]:
    text = io.StringIO()
    return Report(
        directory, num_steps=num_steps, tensorboard_dir=directory / "tensorboard", console=Console(file=text, width=200)
    ), text


def sample(response: str, reward: float) -> Sample:
    return Sample(prompt="1+1=", response=response, label="2", reward=reward)


def test_a_run_ends_with_a_table_a_plot_and_samples_before_and_after(tmp_path: Path) -> None:
    shown, text = report(tmp_path)
    with shown:
        shown.started(76_032, 0)
        shown.evaluation(0, {"eval/sums": 0.25, "eval/sums-truncated_ratio": 0.5}, [sample("3", 0.0)])
        for step, reward in enumerate((0.2, 0.8)):
            shown.step(step, {"rollout/raw_reward": reward, "train/loss": 0.1}, [])
        shown.evaluation(2, {"eval/sums": 0.75, "eval/sums-truncated_ratio": 0.0}, [sample("2", 1.0)])
        shown.next_command = "slime train --more"
        shown.finished()
    for words in ("0.250", "0.750", "'3'", "'2'", "1+1=", "reward.png", "slime train --more"):
        assert words in text.getvalue()
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    assert (evaluation["before"], evaluation["after"]) == (0.25, 0.75)
    assert evaluation["sets"]["sums"]["history"] == [{"step": 0, "score": 0.25}, {"step": 2, "score": 0.75}]
    rows = files.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["rollout/raw_reward"] for row in rows if "train/loss" in row] == [0.2, 0.8]
    assert rows[0]["eval/sums"] == 0.25 and rows[-1]["eval/sums"] == 0.75
    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert list((tmp_path / "tensorboard").iterdir())


def test_metrics_are_json_even_where_a_value_is_not_finite(tmp_path: Path) -> None:
    log = files.MetricsLog(tmp_path / "metrics.jsonl", 0)
    log.append(0, {"train/loss": math.nan, "train/grad_norm": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail) == {
        "step": 0,
        "train/grad_norm": 1.0,
        "train/loss": None,
    }


def test_a_resumed_run_writes_its_steps_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = files.MetricsLog(path, 0)
    for step in range(3):
        log.append(step, {"x": 0.0})
    resumed = files.MetricsLog(path, 1)
    resumed.append(1, {"x": 1.0})
    assert [(row["step"], row["x"]) for row in files.read_metrics(path)] == [(0, 0.0), (1, 1.0)]


def test_a_full_disk_has_a_name_and_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "eval.json"
    files.write_atomically(path, "old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OutOfSpace, match="eval.json"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_scores_of_sets_are_told_from_their_details() -> None:
    scores = {"eval/a": 1.0, "eval/b-c": 0.5}
    details = {"eval/a-truncated_ratio": 0.0, "eval/b-c-response_length": 3.0}
    assert evaluation_scores(scores | details | {"rollout/raw_reward": 2.0}) == {"a": 1.0, "b-c": 0.5}
    assert evaluation_scores(scores | details | {"eval/n_samples": 64.0}) == {"a": 1.0, "b-c": 0.5}
    assert evaluation_scores(scores) == {"a": 1.0, "b-c": 0.5}


def test_an_evaluation_that_no_step_follows_has_a_row_of_its_own(tmp_path: Path) -> None:
    shown, _ = report(tmp_path, num_steps=0)
    with shown:
        shown.started(76_032, 0, 0)
        shown.evaluation(0, {"eval/sums": 0.25, "eval/sums-pass@2": 0.5}, [])
        shown.finished()
    assert files.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "eval/sums": 0.25, "eval/sums-pass@2": 0.5}]


def test_a_rollout_that_failed_as_a_whole_is_said(tmp_path: Path) -> None:
    shown, text = report(tmp_path)
    with shown:
        shown.started(76_032, 0)
        shown.step(0, {"rollout/raw_reward": 0.0, "rollout/failed_ratio": 0.5}, [])
        assert "every sample" not in text.getvalue()
        shown.step(1, {"rollout/raw_reward": 0.0, "rollout/failed_ratio": 1.0}, [])
    assert "step 1: every sample failed" in text.getvalue() and "rollout.log" in text.getvalue()
