"""Fully asynchronous runs of the tiny task, as stale as they may be.

Each run takes some three minutes on an idle machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slow_cases import slow
from tiny_runs import evaluations, metrics, run_command, write_inputs

pytestmark = slow

# The quickstart's, whose synchronous run ends at 0.99.
RECIPE = (
    "--num-rollout", "300", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--rollout-shuffle",
    "--rollout-skip-special-tokens", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096",
    "--adam-beta2", "0.95", "--weight-decay", "0", "--n-samples-per-eval-prompt", "4",
)  # fmt: skip


@pytest.mark.parametrize("staleness", [1, 4])
def test_a_stale_run_learns(tmp_path: Path, staleness: int) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    held_out = ("--eval-prompt-data", "reverse", str(inputs / "held_out.jsonl"))
    mode = ("--fully-async", "--use-tis", "--max-staleness", str(staleness))
    run_command("train-async", inputs, tmp_path / "out", *RECIPE, *held_out, *mode)
    assert max(row["rollout/staleness/max"] for row in metrics(tmp_path / "out")) == staleness
    before, *_, after = (row["eval/reverse"] for row in evaluations(tmp_path / "out"))
    assert before < 0.2 and after > 0.8
