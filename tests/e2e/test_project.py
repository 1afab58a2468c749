"""From `slime init` to an exported model, with the commands that the project's README names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.launcher.metrics.files import is_evaluation, read_metrics

DEADLINE = 600.0


def environment() -> dict[str, str]:
    """The environment of a command that is started elsewhere than the tests: paths of modules may be relative."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": path}


def slime(directory: Path, *words: str, typed: str | None = None) -> str:
    """Runs a command in `directory`, with standard input from a pipe, and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "slime.launcher.cli", *words],
        cwd=directory, env=environment(), input=typed or "", capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_project_is_trained_resumed_scored_asked_and_exported(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    assert "slime train config.yaml" in slime(tmp_path, "init", "mine")

    short = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "8")
    slime(project, "train", "config.yaml", *short, "--num-rollout", "2", "--output-dir", "runs/first")
    # Started elsewhere, it goes on where the run was started.
    slime(tmp_path, "resume", "mine/runs/first", "--num-rollout", "3")
    rows = read_metrics(project / "runs" / "first" / "metrics.jsonl")
    assert [row["step"] for row in rows if not is_evaluation(row)] == [0, 1, 2]

    scores = json.loads(slime(project, "eval", "runs/first", "--json", "--output-dir", "scored"))
    after = json.loads((project / "runs" / "first" / "eval.json").read_text())["after"]
    assert scores["multiples"]["mean"] == pytest.approx(after)
    kept = [json.loads(line) for line in (project / "scored" / "rows.jsonl").read_text().splitlines()]
    assert [row["label"] for row in kept] == [str(n) for n in range(2, 10)]
    assert sum(row["score"] for row in kept) / 8 == pytest.approx(after)

    answer = slime(project, "chat", "runs/first", "--temperature", "0", "--max-tokens", "3", typed="7:\n").strip()
    (asked,) = [row for row in kept if row["label"] == "7"]
    assert answer == asked["response"].strip()

    slime(project, "export", "runs/first", "--output", "exported")
    weights = "model.safetensors"
    trained = project / "runs" / "first" / "model" / weights
    assert (project / "exported" / "tokenizer.json").is_file()
    assert (project / "exported" / weights).stat().st_size == trained.stat().st_size


SCRIPT = """
from pathlib import Path
from slime.launcher import train
from slime.launcher.cli.init import write_project

LONGEST = 3

def short(text):
    return len(text) < LONGEST

def reward(args, sample, **kwargs):
    return float(short(sample.response))

write_project(Path("mine"))
run = train(
    "mine/model", [{"input": "7:"}, {"input": "8:"}], reward, output_dir="run", num_rollout=1, rollout_batch_size=2,
    n_samples_per_prompt=4, rollout_max_response_len=4, log_samples=8,
)
samples = run.samples if isinstance(run.samples, list) else run.samples.to_dict("records")
assert len(samples) == 8 and all(row["reward"] == (len(row["response"]) < 3) for row in samples), samples
print("after", len(run.metrics), "iteration:", run.state, (run.model_dir / "config.json").is_file())
"""


def test_a_script_trains_with_a_function_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "files in" in done.stdout and "after 1 iteration: done True" in done.stdout
