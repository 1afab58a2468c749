"""The tiny quickstart through real Ray, gRPC, HTTP and weight sync, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DEADLINE = 240.0


def quickstart(output_dir: Path, *flags: str, **options) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slime.launcher.quickstart", "--tiny", "--output-dir", str(output_dir), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def finish(process: subprocess.Popen[str], seconds: float = DEADLINE) -> str:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return output


def run(output_dir: Path, *flags: str) -> str:
    process = quickstart(output_dir, *flags)
    output = finish(process)
    assert process.returncode == 0, output
    return output


def metrics(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def timeless(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    output_dir = tmp_path_factory.mktemp("tiny")
    yield output_dir, run(output_dir)


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


def test_two_deterministic_runs_have_the_same_metrics(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for output_dir in (first, second):
        run(output_dir, "--num-rollout", "3")
    rows = timeless(metrics(first))
    assert len(rows) == 3
    assert rows == timeless(metrics(second))


def test_two_trainer_ranks_train_like_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(one, "--num-rollout", "2")
    run(two, "--num-rollout", "2", "--actor-num-gpus-per-node", "2")
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["rollout/raw_reward"] == pytest.approx(b["rollout/raw_reward"], abs=0.02)
        assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-3)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, "--num-rollout", "4")
    keep = ("--buffer-dir", str(tmp_path / "buffer"), "--save-interval", "2", "--run-name", "parts")
    run(parts, "--num-rollout", "2", *keep)
    run(parts, "--num-rollout", "4", *keep, "--load", str(parts / "checkpoints"))
    kept = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(metrics(whole))]
    assert kept == [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(metrics(parts))]


def wait_for(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def trained_a_step(output_dir: Path) -> bool:
    path = output_dir / "metrics.jsonl"
    return path.exists() and path.stat().st_size > 0


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize(
    "number, code, moment",
    [(signal.SIGINT, 130, "starting"), (signal.SIGINT, 130, "training"), (signal.SIGTERM, 143, "training")],
)
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals, code: int, moment: str) -> None:
    process = quickstart(tmp_path)
    log = tmp_path / "logs/rollout.log"
    wait_for(lambda: log.exists() if moment == "starting" else trained_a_step(tmp_path), DEADLINE, moment)
    children = descendants(process)
    assert children
    process.send_signal(number)
    output = finish(process, 60)
    assert process.returncode == code, output
    assert "stopped" in output
    wait_for(lambda: gone(children), 20, "every process has ended")


def test_an_engine_that_dies_ends_the_run_with_its_name(tmp_path: Path) -> None:
    process = quickstart(tmp_path)
    wait_for(
        lambda: (tmp_path / "metrics.jsonl").exists() and (tmp_path / "metrics.jsonl").stat().st_size > 0,
        DEADLINE,
        "a step",
    )
    children = descendants(process)
    (engine,) = [p for p in children if "slime.rollout.engines.embedded" in " ".join(p.cmdline())]
    os.kill(engine.pid, signal.SIGKILL)
    output = finish(process, 60)
    assert process.returncode == 1, output
    assert "EngineError" in output and "embedded-0" in output
    wait_for(lambda: gone(children), 20, "every process has ended")


@pytest.mark.parametrize("name", ["buffer", "trainer-0"])
def test_a_service_that_dies_ends_the_run_with_its_name(tmp_path: Path, name: str) -> None:
    process = quickstart(tmp_path)
    wait_for(
        lambda: (tmp_path / "metrics.jsonl").exists() and (tmp_path / "metrics.jsonl").stat().st_size > 0,
        DEADLINE,
        "a step",
    )
    children = descendants(process)
    log = str(tmp_path / "logs" / f"{name}.log")
    (service,) = [p for p in children if p.name().startswith("ray::") and log in [file.path for file in p.open_files()]]
    os.kill(service.pid, signal.SIGKILL)
    output = finish(process, 60)
    assert process.returncode == 1, output
    assert f"{name} died" in output
    wait_for(lambda: gone(children), 20, "every process has ended")


def test_a_wrong_flag_ends_the_run_before_anything_starts(tmp_path: Path) -> None:
    process = quickstart(tmp_path, "--leraning-rate", "1")
    output = finish(process, 60)
    assert process.returncode == 2, output
    assert "unknown flag --leraning-rate" in output
    assert not (tmp_path / "logs").exists()
