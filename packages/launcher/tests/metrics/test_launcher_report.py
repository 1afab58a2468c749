"""Output of a run, printed and written."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slime.launcher.metrics import files
from slime.launcher.metrics.report import Report, evaluation_scores
from slime.launcher.metrics.sinks.base import Sink
from slime.launcher.metrics.sinks.tensorboard import TensorBoard
from slime.types import Sample
from slime.types.errors import OutOfSpace
from slime.types.files import write_whole


def report(directory: Path, num_steps: int = 2) -> tuple[Report, io.StringIO]:
    text = io.StringIO()
    sinks = [TensorBoard(directory / "tensorboard")]
    return Report(directory, num_steps=num_steps, sinks=sinks, console=Console(file=text, width=200)), text


@pytest.fixture(autouse=True)
def files_of_different_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard reads files in the order of their names, which begin with the second of their start."""
    seconds = itertools.count(1_700_000_000)
    clock = SimpleNamespace(time=lambda: next(seconds))
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)


TIME = {"perf/eval_time": 1.0}


class Recorder(Sink):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append({"step": step, **metrics})


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
    assert [(row["step"], row["eval/sums"]) for row in rows if "eval/sums" in row] == [(0, 0.25), (2, 0.75)]
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
    write_whole(path, "old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutOfSpace, match="eval.json"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_scores_of_sets_are_told_from_their_details() -> None:
    scores = {"eval/a": 1.0, "eval/b-c": 0.5}
    details = {"eval/a-truncated_ratio": 0.0, "eval/b-c-response_length": 3.0}
    assert evaluation_scores(scores | details | {"rollout/raw_reward": 2.0}) == {"a": 1.0, "b-c": 0.5}
    assert evaluation_scores(scores | details | {"eval/n_samples": 64.0}) == {"a": 1.0, "b-c": 0.5}
    assert evaluation_scores(scores) == {"a": 1.0, "b-c": 0.5}
    # A set whose name begins as another's, and one without a prompt that was short enough.
    sets = {f"eval/{name}{detail}": 0.5 for name in ("math", "math-500") for detail in ("", "-truncated_ratio")}
    assert evaluation_scores(sets | {"eval/long-prompt_too_long": 3.0}) == {"math": 0.5, "math-500": 0.5}


def test_an_evaluation_that_no_step_follows_has_a_row_of_its_own(tmp_path: Path) -> None:
    shown, _ = report(tmp_path, num_steps=0)
    with shown:
        shown.started(76_032, 0, 0)
        shown.evaluation(0, {"eval/sums": 0.25, "eval/sums-pass@2": 0.5}, [])
        shown.finished()
    assert files.read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "eval/sums": 0.25, "eval/sums-pass@2": 0.5}]


def trained(directory: Path, first: int, stop: int, *, evaluate: bool = True) -> str:
    """Returns what a start of a run from `first` to `stop` prints; its rewards are the steps' numbers."""
    shown, text = report(directory, num_steps=stop)
    with shown:
        shown.started(76_032, first)
        if evaluate:
            shown.evaluation(first, {"eval/sums": first / 10, **TIME}, [sample(f"after {first}", 0.0)])
        for step in range(first, stop):
            shown.step(step, {"rollout/raw_reward": float(step), "perf/step_time": 1.0}, [])
        shown.evaluation(stop, {"eval/sums": stop / 10, **TIME}, [sample(f"after {stop}", 1.0)])
        shown.finished()
    return text.getvalue()


def test_a_run_without_an_evaluation_before_it_has_no_score_before(tmp_path: Path) -> None:
    shown, text = report(tmp_path)
    with shown:
        shown.started(76_032, 0)
        shown.step(0, {"rollout/raw_reward": 0.5}, [])
        shown.evaluation(1, {"eval/sums": 0.625, **TIME}, [sample("2", 1.0)])
        shown.step(1, {"rollout/raw_reward": 0.5}, [])
        shown.evaluation(2, {"eval/sums": 0.75, **TIME}, [sample("2", 1.0)])
        shown.finished()
    row = next(line for line in text.getvalue().splitlines() if "held out: sums" in line)
    assert row.split() == ["│", "held", "out:", "sums", "│", "-", "│", "0.750", "│"]
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    assert (evaluation["before"], evaluation["after"]) == (None, 0.75)
    assert "held-out evaluation of sums after 1 step: 0.625" in text.getvalue()


def test_a_model_that_is_only_evaluated_was_not_trained_for_0_steps(tmp_path: Path) -> None:
    shown, text = report(tmp_path, num_steps=0)
    with shown:
        shown.started(None, 0)
        shown.evaluation(0, {"eval/sums": 0.75, **TIME}, [sample("2", 1.0)])
        shown.finished()
    assert "held-out evaluation of sums: 0.750" in text.getvalue()
    assert "reward 1.00  '2'" in text.getvalue() and "step" not in text.getvalue()


def test_prompts_that_are_left_out_are_told_of_once(tmp_path: Path) -> None:
    shown, text = report(tmp_path, num_steps=3)
    with shown:
        shown.started(1, 0)
        for step, count in enumerate((0.0, 2.0, 3.0)):
            shown.step(step, {"rollout/raw_reward": 0.5, "rollout/prompt_unusable": count}, [])
    (line,) = [line for line in text.getvalue().splitlines() if "WARNING" in line]
    assert line.startswith("WARNING: step 1 left out prompts (rollout/prompt_unusable 2); ")
    assert line.endswith("rollout.log")


def test_a_resumed_run_ends_with_the_rewards_and_samples_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plotted: list[Any] = []
    monkeypatch.setattr("slime.launcher.metrics.report.plot_reward", lambda path, *drawn: plotted.append(drawn))
    trained(tmp_path, 0, 4)
    # Killed after step 3, the newest checkpoint is that of step 2.
    told = trained(tmp_path, 3, 6)
    steps, rewards, evaluations = plotted[-1]
    assert list(steps) == list(rewards) == [0, 1, 2, 3, 4, 5]
    assert evaluations == {"sums": [(0, 0.0), (3, 0.3), (6, 0.6)]}
    assert "'after 0'" in told and "'after 6'" in told
    assert "1.000" in told and "4.000" in told, "means of the first and the last three rewards"
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    assert (evaluation["before"], evaluation["after"]) == (0.0, 0.6)


def events(directory: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(directory / "tensorboard"))
    shown.Reload()
    return [(event.step, round(event.value, 3)) for event in shown.Scalars(tag)]


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    trained(tmp_path, 0, 4)
    trained(tmp_path, 2, 6)
    assert events(tmp_path, "rollout/raw_reward") == [(s, s) for s in range(6)]
    assert [step for step, _ in events(tmp_path, "eval/sums")] == [0, 2, 6]


def test_tensorboard_keeps_an_evaluation_that_a_resumed_run_does_not_repeat(tmp_path: Path) -> None:
    trained(tmp_path, 0, 2)
    trained(tmp_path, 2, 4, evaluate=False)
    assert events(tmp_path, "eval/sums") == [(0, 0.0), (2, 0.2), (4, 0.4)]
    trained(tmp_path, 4, 5)
    assert events(tmp_path, "eval/sums") == [(0, 0.0), (2, 0.2), (4, 0.4), (5, 0.5)]
    assert events(tmp_path, "rollout/raw_reward") == [(s, s) for s in range(5)]


def test_tensorboard_has_the_step_whose_run_ended_after_its_checkpoint(tmp_path: Path) -> None:
    shown, _ = report(tmp_path, num_steps=3)
    with shown:
        shown.started(76_032, 0)
        shown.step(0, {"rollout/raw_reward": 0.0}, [])
        shown.hold(1, {"rollout/raw_reward": 1.0, "train/kl": math.nan})
    trained(tmp_path, 2, 3)
    assert events(tmp_path, "rollout/raw_reward") == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_an_evaluation_alone_adds_to_what_an_earlier_run_left(tmp_path: Path) -> None:
    trained(tmp_path, 0, 4)
    before = (tmp_path / "metrics.jsonl").read_text()
    shown, _ = report(tmp_path, num_steps=0)
    with shown:
        shown.started(76_032, 4, 0)
        shown.evaluation(4, {"eval/sums": 0.9, **TIME}, [])
        shown.finished()
    assert (tmp_path / "metrics.jsonl").read_text().startswith(before)
    history = json.loads((tmp_path / "eval.json").read_text())["sets"]["sums"]["history"]
    assert history == [{"step": 0, "score": 0.0}, {"step": 4, "score": 0.9}]


def test_an_evaluation_alone_has_one_score_and_one_response(tmp_path: Path) -> None:
    shown, text = report(tmp_path, num_steps=0)
    with shown:
        shown.started(76_032, 0, 0)
        shown.evaluation(0, {"eval/sums": 0.25}, [Sample(prompt="1+1=", response="3", reward=0.0)])
        text.truncate(0)
        shown.finished()
    printed = text.getvalue()
    assert printed.count("0.250") == printed.count("'3'") == 1 and "score" in printed
    assert "before" not in printed and "answer" not in printed


def test_a_prompt_with_images_is_shown_by_its_last_message(tmp_path: Path) -> None:
    shown, text = report(tmp_path, num_steps=0)
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Which colour?"}]
    prompt: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    with shown:
        shown.started(76_032, 0, 0)
        shown.evaluation(0, {"eval/colours": 0.5}, [Sample(prompt=prompt, response="red", reward=0.5)])
        shown.finished()
    assert "<image>Which colour?" in text.getvalue() and "Be brief" not in text.getvalue()


def test_evaluations_before_and_after_the_first_step_are_both_kept(tmp_path: Path) -> None:
    sink = Recorder()
    with Report(tmp_path, num_steps=2, sinks=[sink], console=Console(quiet=True)) as shown:
        shown.started(76_032, 0)
        shown.evaluation(0, {"eval/sums": 0.25, **TIME}, [])
        for step in range(2):
            shown.step(step, {"train/loss": 0.1}, [])
            shown.evaluation(step + 1, {"eval/sums": 0.5 + step, **TIME}, [])
    written = [
        {"step": 0, "eval/sums": 0.25, **TIME},
        {"step": 0, "train/loss": 0.1},
        {"step": 1, "eval/sums": 0.5, **TIME},
        {"step": 1, "train/loss": 0.1},
        {"step": 2, "eval/sums": 1.5, **TIME},
    ]
    assert files.read_metrics(tmp_path / "metrics.jsonl") == written
    assert sink.rows == written


def test_a_resumed_run_has_one_evaluation_of_its_first_weights(tmp_path: Path) -> None:
    for resumed in (0, 1):
        with Report(tmp_path, num_steps=2, console=Console(quiet=True)) as shown:
            shown.started(76_032, resumed)
            shown.evaluation(resumed, {"eval/sums": 0.0 + resumed, **TIME}, [])
            for step in range(resumed, 2):
                shown.step(step, {"train/loss": 0.1}, [])
                shown.evaluation(step + 1, {"eval/sums": 1.0 + step, **TIME}, [])
    rows = files.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if files.is_evaluation(row)] == [0, 1, 2]
    assert [row["step"] for row in rows if not files.is_evaluation(row)] == [0, 1]
    # One that does not begin with an evaluation keeps the score of those weights.
    files.MetricsLog(tmp_path / "metrics.jsonl", 1).append(1, {"train/loss": 0.2})
    assert [row["step"] for row in files.read_metrics(tmp_path / "metrics.jsonl")] == [0, 0, 1, 1]


def test_a_rollout_that_failed_as_a_whole_is_said(tmp_path: Path) -> None:
    shown, text = report(tmp_path)
    with shown:
        shown.started(76_032, 0)
        shown.step(0, {"rollout/raw_reward": 0.0, "rollout/failed_ratio": 0.5}, [])
        assert "every sample" not in text.getvalue()
        shown.step(1, {"rollout/raw_reward": 0.0, "rollout/failed_ratio": 1.0}, [])
    assert "step 1: every sample failed" in text.getvalue() and "rollout.log" in text.getvalue()


def test_a_row_that_was_held_is_there_when_the_run_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = files.MetricsLog(path, 0)
    log.append(0, {"train/loss": 0.5})
    log.hold(1, {"train/loss": 0.25})  # and the run ends with its checkpoint
    after_the_checkpoint = tmp_path / "after"
    after_the_checkpoint.mkdir()
    for file in tmp_path.glob("*metrics*"):
        (after_the_checkpoint / file.name).write_text(file.read_text())
    files.MetricsLog(after_the_checkpoint / "metrics.jsonl", 2).append(2, {"train/loss": 0.1})
    rows = files.read_metrics(after_the_checkpoint / "metrics.jsonl")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(0, 0.5), (1, 0.25), (2, 0.1)]
    # Before the checkpoint was complete: the step is done again.
    files.MetricsLog(path, 1).append(1, {"train/loss": 0.2})
    assert [row["train/loss"] for row in files.read_metrics(path)] == [0.5, 0.2]
    files.MetricsLog(path, 2)
    assert [row["train/loss"] for row in files.read_metrics(path)] == [0.5, 0.2]


@pytest.mark.parametrize("torn", ['{"step": 2, "tr', "\x00\x00\x00", '{"step": 2}x\n'])
@pytest.mark.parametrize("first_step", [2, None])
def test_a_run_goes_on_after_a_line_of_metrics_that_was_half_written(
    tmp_path: Path, torn: str, first_step: int | None
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = files.MetricsLog(path, 0)
    for step in (0, 1):
        log.append(step, {"train/loss": 0.5})
    with path.open("a") as file:
        file.write(torn)
    resumed = files.MetricsLog(path, first_step)
    resumed.append(2, {"train/loss": 0.25})
    assert [row["step"] for row in resumed.rows()] == [0, 1, 2]


def test_a_run_whose_first_score_was_not_finite_resumes_and_finishes(tmp_path: Path) -> None:
    scores = {"eval/a": math.nan, "eval/a-truncated_ratio": 0.0, **TIME}
    files.MetricsLog(tmp_path / "metrics.jsonl", 0).append(0, scores)
    report = Report(tmp_path, num_steps=3, console=Console(file=io.StringIO()))
    report.started(1, 1)
    report.evaluation(3, scores | {"eval/a": 0.5}, [])
    report.finished()
    assert json.loads((tmp_path / "eval.json").read_text())["sets"]["a"]["history"] == [{"step": 3, "score": 0.5}]
