"""Fully asynchronous training through real Ray, gRPC, HTTP and weight sync, as a user runs it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from slime.launcher.run_directory.checkpoints import steps
from tiny_runs import (
    DEADLINE,
    command,
    descendants,
    finish,
    gone,
    metrics,
    run_command,
    timeless,
    wait_for,
    wait_for_the_end_of,
    write_inputs,
)

NUM_GPUS = 0
MODE = ("--fully-async", "--use-tis")
# Metrics of generation as a whole, which a run without iterations does not have.
OF_A_CALL = ("rollout/non_generation_time", "rollout/dropped_stale", "rollout/engines")


def trained(output_dir: Path, steps: int) -> bool:
    return (output_dir / "metrics.jsonl").exists() and len(metrics(output_dir)) >= steps


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_without_staleness_a_run_equals_the_synchronous_one_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    flags = ("--num-rollout", "4", "--deterministic")
    run_command("train", inputs, tmp_path / "sync", *flags)
    run_command("train-async", inputs, tmp_path / "async", *flags, "--fully-async", "--max-staleness", "0")
    sync, fully = (timeless(metrics(tmp_path / name)) for name in ("sync", "async"))
    for row in [*sync, *fully]:
        for name in OF_A_CALL:
            row.pop(name, None)
    assert fully == sync
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("sync", "async")]
    assert weights[0] == weights[1]


def test_a_run_stays_within_its_staleness_and_leaves_nothing_when_it_is_interrupted(
    inputs: Path, tmp_path: Path
) -> None:
    process = command("train-async", inputs, tmp_path, *MODE, "--num-rollout", "100000", "--max-staleness", "1")
    wait_for(lambda: trained(tmp_path, 20), DEADLINE, "twenty steps")
    children = descendants(process)
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    wait_for(lambda: gone(children), DEADLINE, "every process has ended")

    rows = metrics(tmp_path)
    assert len(rows) >= 20 and [row["step"] for row in rows] == list(range(len(rows)))
    assert all(0 <= row["rollout/staleness"] <= row["rollout/staleness/max"] <= 1 for row in rows)
    assert all(row["perf/rollout_wait_time"] >= 0 and row["rollout/dropped_stale"] == 0 for row in rows)


def test_a_killed_run_goes_on(inputs: Path, tmp_path: Path) -> None:
    keep = ("--buffer-dir", str(tmp_path / "buffer"), "--save-interval", "2", "--run-name", "parts")
    out = tmp_path / "out"
    process = command("train-async", inputs, out, *MODE, *keep, "--num-rollout", "100000")
    wait_for(lambda: trained(out, 5), DEADLINE, "five steps")
    children = descendants(process)
    process.kill()
    finish(process)
    wait_for_the_end_of(children)

    done = max(steps(out / "checkpoints")) + 1
    load = ("--load", str(out / "checkpoints"))
    run_command("train-async", inputs, out, *MODE, *keep, *load, "--num-rollout", str(done + 4))
    assert [row["step"] for row in metrics(out)] == list(range(done + 4))
