"""PPO with a critic: a whole run, and one that is continued from its checkpoint."""

from __future__ import annotations

from pathlib import Path

from tiny_runs import metrics, run, timeless

PPO = (
    "--advantage-estimator", "ppo", "--critic-lr", "2e-3", "--lambd", "0.95", "--num-critic-only-steps", "1",
    "--save-interval", "2",
)  # fmt: skip


def test_a_run_with_a_critic_is_continued_from_its_checkpoint(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(straight, *PPO, "--num-rollout", "4", "--save", str(tmp_path / "checkpoints"))
    rows = metrics(straight)
    assert [row["train/step"] for row in rows] == [0, 1, 2, 3], "the critic trains alone at first"
    assert all(row["train/critic-grad_norm"] > 0 for row in rows)
    assert rows[-1]["train/critic-explained_variance"] > rows[0]["train/critic-explained_variance"]
    (first,) = (
        path for path in (tmp_path / "checkpoints").iterdir() if (path / "critic").is_dir() and "1" in path.name
    )
    run(resumed, *PPO, "--num-rollout", "4", "--load", str(first))
    assert timeless(metrics(resumed)) == timeless(rows)[2:]
