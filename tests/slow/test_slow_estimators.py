"""Estimators, and variants of the loss, that train the tiny model to reverse digits, whatever the seed.

Each run takes some two minutes on an idle machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tiny_runs import finish, metrics, quickstart

pytestmark = pytest.mark.skipif(not os.environ.get("SLIME_SLOW"), reason="slow: SLIME_SLOW=1 runs it")


# The quickstart's recipe is grpo without division by the deviation.
VARIANTS = {
    "rloo": ("--advantage-estimator", "rloo"),
    "top-p": ("--rollout-top-p", "0.95"),
    "ppo": ("--advantage-estimator", "ppo", "--critic-lr", "2e-3", "--lambd", "0.95"),
    "gspo": ("--advantage-estimator", "gspo"),
    "cispo": ("--advantage-estimator", "cispo"),
    "reinforce++": ("--advantage-estimator", "reinforce_plus_plus", "--normalize-advantages"),
    "reinforce++ baseline": ("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages"),
    "dr-grpo": ("--loss-divisor", "5"),
    "deviation of the batch": ("--grpo-std-scope", "batch"),
    "tis": ("--use-tis",),
    "sequence tis": ("--use-tis", "--tis-mode", "sequence_truncate"),
    "icepop": ("--use-tis", "--tis-mode", "token_mask", "--tis-clip-low", "0.5"),
    "mis": ("--use-tis", "--tis-mode", "sequence_mask", "--tis-clip-low", "0.5"),
    # The right answer has five tokens.
    "overlong": ("--overlong-mask", "--overlong-buffer-len", "2", "--rollout-max-response-len", "8"),
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_learns_with_every_seed(tmp_path: Path, variant: str, seed: int) -> None:
    process = quickstart(tmp_path, *VARIANTS[variant], "--seed", str(seed), "--rollout-seed", str(seed))
    output = finish(process, seconds=900)
    assert process.returncode == 0, output
    rewards = [row["rollout/raw_reward"] for row in metrics(tmp_path)]
    assert sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) / 3 > 0.9, output
