"""Rewards of runs that differ by their seed: a table, and a picture of the mean with the range of the seeds.

python benchmarks/rollout/reward_curves.py PICTURE.png "text game=runs/a,runs/b,runs/c" ...

Directories of runs, or of logs of tinker-cookbook's recipes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime.launcher.metrics.files import read_metrics
from slime.types.errors import counted

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")
ENDS = 10
# Shorter runs are drawn as they are.
SMOOTHED = 50
REWARDS = ("rollout/raw_reward", "env/all/reward/total")


def rewards_of(run: Path) -> list[float]:
    rows = read_metrics(run / "metrics.jsonl")
    return [row[name] for row in rows for name in REWARDS if name in row]


def smooth(rewards: Sequence[float], width: int = 10) -> list[float]:
    return [float(np.mean(rewards[max(0, i - width + 1) : i + 1])) for i in range(len(rewards))]


def main(picture: str, *names: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    width = 1
    print(f"| task | seeds | reward, first {ENDS} iterations | last {ENDS} |\n|---|---|---|---|")
    for text, color in zip(names, COLORS, strict=False):
        name, _, paths = text.partition("=")
        seeds = [rewards_of(Path(path)) for path in paths.split(",")]
        steps = range(min(map(len, seeds)))
        width = 10 if len(steps) > SMOOTHED else 1
        curves = np.array([smooth(rewards, width)[: len(steps)] for rewards in seeds])
        axes.plot(steps, curves.mean(0), color=color, linewidth=2, label=f"{name}, {counted(len(seeds), 'seed')}")
        axes.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.2, linewidth=0)
        first, last = (
            ", ".join(f"{np.mean(rewards[part]):.3f}" for rewards in seeds)
            for part in (slice(None, ENDS), slice(-ENDS, None))
        )
        print(f"| {name} | {len(seeds)} | {first} | {last} |")
    axes.set(xlabel="iteration", ylabel="mean reward" + ", of 10 iterations" * (width > 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
