"""Estimators that train the tiny model to reverse digits, whatever the seed.

Each run takes some two minutes on an idle machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tiny_runs import finish, metrics, quickstart

pytestmark = pytest.mark.skipif(not os.environ.get("SLIME_SLOW"), reason="slow: SLIME_SLOW=1 runs it")


ESTIMATORS = {
    "rloo": (),
    "grpo": ("--rollout-top-p", "0.95"),
    "ppo": ("--critic-lr", "2e-3", "--lambd", "0.95"),
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_estimator_learns_with_every_seed(tmp_path: Path, estimator: str, seed: int) -> None:
    seeds = ("--seed", str(seed), "--rollout-seed", str(seed))
    flags = ("--advantage-estimator", estimator, *ESTIMATORS[estimator], *seeds)
    process = quickstart(tmp_path, *flags)
    output = finish(process, seconds=900)
    assert process.returncode == 0, output
    rewards = [row["rollout/raw_reward"] for row in metrics(tmp_path)]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.9, output
