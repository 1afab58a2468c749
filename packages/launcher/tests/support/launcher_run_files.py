"""Directories of runs as a run writes them, with faults where a test plants them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.launcher.run_directory.kept_samples import DIRECTORY, write_file
from slime.launcher.show.answers import Answers

Row = dict[str, Any]
PROMPT = [3, 4, 5]


def kept_row(step: int, index: int, *, group_index: int = 0, reward: float = 0.0, response: str = "12") -> Row:
    """A sample of a policy whose engine and trainer agree: four tokens, all of them generated in `step`."""
    random = np.random.default_rng([step, index])
    log_probs = (-random.uniform(0.1, 4, 4)).astype(np.float32)
    return {
        "step": step, "dataset": "train", "group_index": group_index, "index": index, "prompt": f"p{group_index}",
        "response": response, "label": "21", "reward": reward, "reward_json": None, "status": "completed",
        "response_length": 4, "tokens": [*PROMPT, 6, 7, 8, 1], "loss_mask": [1, 1, 1, 1],
        "engine_log_probs": log_probs.tolist(), "trainer_log_probs": (log_probs + 0.01).tolist(),
        "spans": [{"start": 0, "end": 4, "weight_version": str(step)}], "metadata": "{}",
    }  # fmt: skip


def group(step: int, group_index: int = 0, size: int = 4) -> list[Row]:
    """Half of the responses are the label and get 1, the others 0."""
    return [
        kept_row(step, group_index * size + i, group_index=group_index, reward=float(i % 2),
                 response="21" if i % 2 else f"{i}0")
        for i in range(size)
    ]  # fmt: skip


def checked(answers: Answers) -> dict[str, Any]:
    """Returns what the checks of the first run find once they have seen every file; each call takes a moment."""
    while True:
        found = answers.checks({"run": "0"})
        if found["checked"] == found["files"]:
            return found


def metrics_row(step: int, reward: float | None = None) -> Row:
    reward = step / 100 if reward is None else reward
    return {"step": step, "rollout/raw_reward": reward, "train/loss": -0.1, "perf/step_time": 3.0,
            "perf/rollout_time": 2.0, "perf/train_time": 0.5}  # fmt: skip


def add_steps(run: Path, steps: Sequence[int]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(metrics_row(step)) + "\n" for step in steps)


def make_run(
    run: Path, steps: int = 6, *, settings: str = "num_rollout: 6\n", fault: Callable[[list[Row]], object] | None = None
) -> Path:
    """A run with an evaluation before and after, and samples of every step. fault: changes the rows of step 3."""
    (run / DIRECTORY).mkdir(parents=True)
    (run / "run.yaml").write_text(
        f"hf_checkpoint: /models/tiny\n{settings}\n# Everything else, as it was:\n# lr: 1.0e-06\n# rm_type: integer\n"
    )
    evaluation = {"step": 0, "eval/gsm": 0.25, "eval/gsm-truncated_ratio": 0.5, "perf/eval_time": 1.0}
    (run / "metrics.jsonl").write_text(json.dumps(evaluation) + "\n")
    add_steps(run, range(steps))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evaluation | {"step": steps, "eval/gsm": 0.75}) + "\n")
    for step in range(steps):
        rows = [*group(step), *group(step, 1)]
        if fault is not None and step == 3:
            fault(rows)
        write_file(run / DIRECTORY / f"{step:06d}.parquet", rows)
    for step in (0, steps):
        rows = [kept_row(step, 0, reward=float(step > 0), response="21" if step else "9") | {"dataset": "gsm"}]
        write_file(run / DIRECTORY / f"eval-{step:06d}.parquet", rows)
    return run
