"""Rewards of runs that differ by their seed: a table, and a picture of the mean with the range of the seeds.

python benchmarks/rollout/reward_curves.py PICTURE.png "text game=runs/a,runs/b,runs/c" ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime.launcher.metrics.files import read_metrics

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")
ENDS = 10


def rewards_of(run: Path) -> list[float]:
    rows = read_metrics(run / "metrics.jsonl")
    return [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]


def smooth(rewards: Sequence[float], width: int = 10) -> list[float]:
    return [float(np.mean(rewards[max(0, i - width + 1) : i + 1])) for i in range(len(rewards))]


def main(picture: str, *names: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    print(f"| task | seeds | reward, first {ENDS} iterations | last {ENDS} |\n|---|---|---|---|")
    for text, color in zip(names, COLORS, strict=False):
        name, _, paths = text.partition("=")
        seeds = [rewards_of(Path(path)) for path in paths.split(",")]
        steps = range(min(map(len, seeds)))
        curves = np.array([smooth(rewards)[: len(steps)] for rewards in seeds])
        axes.plot(steps, curves.mean(0), color=color, linewidth=2, label=f"{name}, {len(seeds)} seeds")
        axes.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.2, linewidth=0)
        first, last = (
            ", ".join(f"{np.mean(rewards[part]):.3f}" for rewards in seeds)
            for part in (slice(None, ENDS), slice(-ENDS, None))
        )
        print(f"| {name} | {len(seeds)} | {first} | {last} |")
    axes.set(xlabel="iteration", ylabel="mean reward, of 10 iterations")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
