"""One-step-off training through real Ray, gRPC, HTTP and weight sync, as a user runs it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from slow_cases import slow
from tiny_runs import (
    DEADLINE,
    command,
    command_line,
    descendants,
    finish,
    gone,
    metrics,
    run_command,
    trained_a_step,
    wait_for,
    write_inputs,
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_generation_and_training_overlap_and_a_resumed_run_goes_on(inputs: Path, tmp_path: Path) -> None:
    keep = ("--buffer-dir", str(tmp_path / "buffer"), "--save-interval", "3", "--run-name", "parts")
    run_command("train-async", inputs, tmp_path, "--num-rollout", "3", *keep)
    first = metrics(tmp_path)
    assert [row["rollout/staleness/max"] for row in first] == [0, 1, 1]
    assert [row["rollout/weight_version_min"] for row in first] == [0, 0, 1]
    assert all(row["perf/overlap_time"] > 0 for row in first[:-1]) and first[-1]["perf/overlap_time"] == 0
    assert all(row["train/train_rollout_logprob_abs_diff"] > 1e-4 for row in first[1:])

    held = ("--eval-prompt-data", "held", str(inputs / "held_out.jsonl") + "@[0:8]", "--skip-eval-before-train")
    interval = ("--update-weights-interval", "2", "--load", str(tmp_path / "checkpoints"))
    output = run_command("train-async", inputs, tmp_path, "--num-rollout", "7", *keep, *interval, *held)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(7)), output
    # Pushed at the start (3), and after the steps 3 and 5.
    assert [row["rollout/weight_version_min"] for row in rows[3:]] == [3, 3, 4, 4]
    assert ["perf/update_weights_time" in row for row in rows[3:]] == [True, False, True, True]
    assert json.loads((tmp_path / "eval.json").read_text())["sets"]["held"]["history"][-1]["step"] == 7


@slow
def test_ctrl_c_and_a_service_that_dies_end_the_run_at_once(inputs: Path, tmp_path: Path) -> None:
    long = ("--num-rollout", "100000", "--async-buffer-size", "2")
    process = command("train-async", inputs, tmp_path / "interrupted", *long)
    wait_for(lambda: trained_a_step(tmp_path / "interrupted"), DEADLINE, "a step")
    children = descendants(process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    wait_for(lambda: gone(children), DEADLINE, "every process has ended")

    process = command("train-async", inputs, tmp_path / "killed", *long, "--no-use-fault-tolerance")
    wait_for(lambda: trained_a_step(tmp_path / "killed"), DEADLINE, "a step")
    children = descendants(process)
    (engine,) = [p for p in children if "slime.rollout.engines.embedded" in command_line(p)]
    engine.kill()
    output = finish(process)
    assert process.returncode == 1 and "engine embedded-0" in output, output
    wait_for(lambda: gone(children), DEADLINE, "every process has ended")


def test_colocate_is_refused_with_the_reason(inputs: Path, tmp_path: Path) -> None:
    process = command("train-async", inputs, tmp_path / "out", "--num-rollout", "1", "--colocate")
    output = " ".join(finish(process).split())
    assert process.returncode == 2, output
    assert "engines and trainer work at the same time" in output
    assert not (tmp_path / "out").exists()
