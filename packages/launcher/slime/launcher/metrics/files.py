"""The files of a run: metrics.jsonl and reward.png."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.types.directories import path_errors
from slime.types.files import check_file_place, write_whole

Metrics = dict[str, float]


class MetricsLog:
    """metrics.jsonl: a JSON object for each step, numbered from 0, and for each evaluation, with the number of steps
    before it. Rows from `first_step` on will be written again; with None, all rows stay.
    """

    def __init__(self, path: Path, first_step: int | None) -> None:
        self.path = path
        self._first_step = first_step
        self._held = path.with_name(f".{path.name}.held")
        # The row of the step before the first one, if the earlier start ended before it was written.
        self.restored: dict[str, Any] | None = None
        for file in (path, self._held):
            check_file_place(file, field="--output-dir")
        if path.exists():
            self._keep(lambda row: first_step is None or row["step"] < first_step + is_evaluation(row))
        if first_step is not None:
            self._restore()

    def hold(self, step: int, metrics: Metrics) -> None:
        """Keeps the row of a step whose checkpoint is about to be written, in case the run ends before `append`."""
        write_whole(self._held, _line(step, metrics))

    def _restore(self) -> None:
        """Appends the row that was held, if the run continues from the checkpoint of its step."""
        if not self._held.exists():
            return
        line = self._held.read_text()
        step = json.loads(line)["step"]
        rows = read_metrics(self.path) if self.path.exists() else []
        if step + 1 == self._first_step and not any(row["step"] == step and not is_evaluation(row) for row in rows):
            self._append(line)
            self.restored = json.loads(line)
        self._held.unlink()

    def rows(self) -> list[dict[str, Any]]:
        """Returns the rows that earlier starts of the run have left."""
        return read_metrics(self.path) if self.path.exists() else []

    def append_evaluation(self, step: int, metrics: Metrics) -> None:
        """Adds an evaluation, replacing the one of the same weights from before the run was resumed."""
        if step == self._first_step and self.path.exists():
            self._keep(lambda row: not (row["step"] == step and is_evaluation(row)))
        self.append(step, metrics)

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        text = self.path.read_text()
        kept = "".join(line + "\n" for line in _whole_lines(text) if wanted(json.loads(line)))
        if kept != text:
            write_whole(self.path, kept)

    def append(self, step: int, metrics: Metrics) -> None:
        self._append(_line(step, metrics))

    def _append(self, line: str) -> None:
        with path_errors(self.path), self.path.open("a") as file:
            file.write(line)


def _line(step: int, metrics: Metrics) -> str:
    # NaN is not JSON: readers in other languages refuse it.
    plain = {key: value if math.isfinite(value) else None for key, value in sorted(metrics.items())}
    return json.dumps({"step": step, **plain}) + "\n"


def _whole_lines(text: str) -> list[str]:
    """Returns the lines, without the last one if the process or the machine died while it was written."""
    lines = text.splitlines()
    try:
        json.loads(lines[-1] if lines else "{}")
    except ValueError:
        lines.pop()
    return lines


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Returns whether a row of metrics.jsonl is that of an evaluation."""
    return "perf/eval_time" in row and "perf/step_time" not in row


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl, without a half-written last one."""
    return [json.loads(line) for line in _whole_lines(path.read_text())]


def plot_reward(
    path: Path, steps: Sequence[int], rewards: Sequence[float], evaluations: dict[str, list[tuple[int, float]]]
) -> None:
    """Draws reward.png: the mean reward of each step, and of each evaluation set."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    dense = len(steps) > 40
    axes.plot(
        steps,
        rewards,
        color="#4477aa",
        linewidth=1,
        alpha=0.4 if dense else 1,
        marker=None if dense else "o",
        label="rollout reward",
    )
    if dense:
        axes.plot(steps, _smooth(rewards, 15), color="#4477aa", linewidth=2, label="rollout reward, mean of 15 steps")
    for (name, points), color in zip(evaluations.items(), ("#ee6677", "#228833", "#ccbb44", "#aa3377"), strict=False):
        axes.plot(*zip(*points, strict=True), color=color, marker="s", linestyle="--", label=f"held out: {name}")
    axes.set(xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: Sequence[float], width: int) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / (i + 1 - max(0, i - width + 1)) for i in range(len(values))]
