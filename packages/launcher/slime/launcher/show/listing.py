"""Tables of runs: a list for `slime runs`, runs side by side for `slime compare`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from slime.launcher.metrics.printable import printable
from slime.launcher.show.run_files import LAST, RunFiles, finite

# Metrics to compare, if the runs have them.
COMPARED = (
    "rollout/raw_reward", "rollout/response_lengths", "rollout/truncated_ratio", "rollout/zero_std_ratio",
    "rollout/staleness", "train/loss", "train/grad_norm", "train/entropy_loss", "train/pg_clipfrac",
    "train/train_rollout_logprob_abs_diff", "perf/tokens_per_second", "perf/rollout_time", "perf/train_time",
    "perf/update_weights_time", "perf/step_time",
)  # fmt: skip
COLOURS = {"running": "cyan", "done": "green", "failed": "red", "stopped": "yellow"}


def described(run: RunFiles) -> dict[str, Any]:
    """Describes one run as `slime runs --json` prints it."""
    state, steps, scores = run.state, run.steps(), run.scores()
    started = run.started()
    # The clock may have been set back since, or be that of another machine.
    seconds = None if started is None or (since := time.time() - started) < 0 else since
    return {
        "run": str(run.path), "name": run.name, "state": state.state, "phase": state.phase, "error": state.error,
        "model": run.model, "steps": steps[-1]["step"] + 1 if steps else 0,
        "num_steps": state.num_steps or run.settings.get("num_rollout"), "reward": run.reward(),
        "scores": {name: dict(zip(("first", "last"), _ends(points), strict=True)) for name, points in scores.items()},
        "started": started, "age_seconds": seconds,
    }  # fmt: skip


def listing(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("run", "state", "steps", "reward", "scores", "age", "model", box=None, pad_edge=False)
    for row in rows:
        total = f"/{row['num_steps']}" if row["num_steps"] else ""
        scores = ", ".join(f"{name} {_arrow('.3f', **score)}" for name, score in row["scores"].items())
        state = row["state"]
        table.add_row(
            printable(row["name"]), Text(printable(state), style=COLOURS.get(state, "default")),
            printable(f"{row['steps']}{total}"), shown(row["reward"]), printable(scores) or "-",
            age(row["age_seconds"]), printable(row["model"]) or "-",
        )  # fmt: skip
    return table


def compared(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Returns the settings that differ, and means of each metric over the last steps of each run."""
    names = sorted({name for run in runs for name in run.settings})
    settings = {name: [run.settings.get(name) for run in runs] for name in names}
    metrics = {key: [_end(run, key) for run in runs] for key in COMPARED}
    sets = sorted({name for run in runs for name in run.scores()})
    return {
        "runs": [described(run) for run in runs],
        "settings": {name: values for name, values in settings.items() if len(set(map(str, values))) > 1},
        "metrics": {key: values for key, values in metrics.items() if any(value is not None for value in values)},
        "scores": {name: [_score(run, name) for run in runs] for name in sets},
    }


def comparison(answer: dict[str, Any]) -> list[Table]:
    names = [printable(run["name"]) for run in answer["runs"]]
    tables = []
    settings = Table("setting", *names, title="Settings that differ", title_justify="left", box=None, pad_edge=False)
    for name, values in answer["settings"].items():
        settings.add_row(printable(str(name)), *("-" if value is None else printable(str(value)) for value in values))
    tables.append(settings)
    means = f"Metrics, means of the last {LAST} steps"
    metrics = Table("metric", *names, title=means, title_justify="left", box=None, pad_edge=False)
    metrics.add_row("steps", *(str(run["steps"]) for run in answer["runs"]))
    for key, values in answer["metrics"].items():
        metrics.add_row(key, *map(shown, values))
    tables.append(metrics)
    if answer["scores"]:
        scores = Table("set", *names, title="Evaluation, first → last", title_justify="left", box=None, pad_edge=False)
        for name, pairs in answer["scores"].items():
            scores.add_row(printable(name), *("-" if pair is None else _arrow(".4g", *pair) for pair in pairs))
        tables.append(scores)
    return tables


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _end(run: RunFiles, key: str) -> float | None:
    values = [value for row in run.steps()[-LAST:] if (value := finite(row.get(key))) is not None]
    return sum(values) / len(values) if values else None


def _score(run: RunFiles, name: str) -> tuple[float | None, float] | None:
    points = run.scores().get(name)
    return None if points is None else _ends(points)


def _ends(points: Sequence[tuple[int, float]]) -> tuple[float | None, float]:
    """Returns the first and the last score; no first one of a single evaluation, which shows no change."""
    return points[0][1] if len(points) > 1 else None, points[-1][1]


def _arrow(form: str, first: float | None, last: float) -> str:
    return f"{last:{form}}" if first is None else f"{first:{form}} → {last:{form}}"
