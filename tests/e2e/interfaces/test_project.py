"""From `slime init` to an exported model, with the commands that the project's README names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_cluster import RayCluster
from slime.launcher.metrics.files import is_evaluation, read_metrics

DEADLINE = 600.0
SMALL = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "8")


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """The environment of commands, which share one Ray: to start it takes as long as one of them."""
    with RayCluster() as cluster:
        # Commands are started elsewhere than the tests: paths of modules may be relative.
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
        yield cluster.environment | {"PYTHONPATH": path, "RAY_ADDRESS": cluster.address}


def test_a_new_project_is_trained_resumed_scored_asked_and_exported(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    def slime(directory: Path, *words: str, typed: str = "") -> str:
        """Runs a command in `directory`, with standard input from a pipe, and returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "slime.launcher.cli", *words],
            cwd=directory, env=environment, input=typed, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    project = tmp_path / "mine"
    run = project / "runs" / "first"
    assert "slime train config.yaml" in slime(tmp_path, "init", "mine")
    slime(project, "train", "config.yaml", *SMALL, "--num-rollout", "1", "--output-dir", "runs/first")
    # Started elsewhere, it goes on where the run was started.
    slime(tmp_path, "resume", "mine/runs/first", "--num-rollout", "2")
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if not is_evaluation(row)] == [0, 1]

    with ThreadPoolExecutor() as pool:
        evaluated = pool.submit(slime, project, "eval", "runs/first", "--json", "--output-dir", "scored")
        asking = ("chat", "runs/first", "--temperature", "0", "--max-tokens", "3")
        answer = pool.submit(slime, project, *asking, typed="7:\n")
        exported = pool.submit(slime, project, "export", "runs/first", "--output", "exported")
        scores = json.loads(evaluated.result())
        exported.result()
    after = json.loads((run / "eval.json").read_text())["after"]
    assert scores["multiples"]["mean"] == pytest.approx(after)
    kept = [json.loads(line) for line in (project / "scored" / "rows.jsonl").read_text().splitlines()]
    assert [row["label"] for row in kept] == [str(n) for n in range(2, 10)]
    assert sum(row["score"] for row in kept) / 8 == pytest.approx(after)
    (asked,) = [row for row in kept if row["label"] == "7"]
    assert answer.result().strip() == asked["response"].strip()
    assert (project / "exported" / "tokenizer.json").is_file()
    sizes = {(place / "model.safetensors").stat().st_size for place in (run / "model", project / "exported")}
    assert len(sizes) == 1
