"""PPO with a critic: a whole run, and one that is continued from its checkpoint."""

from __future__ import annotations

from pathlib import Path

from slow_cases import slow
from tiny_runs import metrics, run

PPO = (
    "--advantage-estimator", "ppo", "--critic-lr", "2e-3", "--lambd", "0.95", "--num-critic-only-steps", "1",
    "--save-interval", "2",
)  # fmt: skip


def learning(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("train/") or key == "rollout/raw_reward"}


def test_a_run_with_a_critic_is_continued_from_its_checkpoint(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(straight, *PPO, "--num-rollout", "4", "--save", str(tmp_path / "checkpoints"))
    rows = metrics(straight)
    assert [row["train/step"] for row in rows] == [0, 1, 2, 3], "the critic trains alone at first"
    assert all(row["train/critic-grad_norm"] > 0 for row in rows)
    assert all(row["train/critic-explained_variance"] <= 1 for row in rows)
    (first,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.name.endswith("1"))
    assert (first / "critic" / "model.safetensors").is_file()
    run(resumed, *PPO, "--num-rollout", "4", "--load", str(first))
    assert [learning(row) for row in metrics(resumed)] == [learning(row) for row in rows[2:]]


@slow
def test_megatron_trains_and_saves_a_critic(tmp_path: Path) -> None:
    """On two ranks that share every layer. Resuming has tests in packages/trainer."""
    layout = ("--train-backend", "megatron", "--tensor-model-parallel-size", "2", "--sequence-parallel")
    run(tmp_path / "run", *PPO, *layout, "--num-rollout", "2")
    rows = metrics(tmp_path / "run")
    assert [row["train/step"] for row in rows] == [0, 1], "the critic trains alone at first"
    assert all(row["train/critic-grad_norm"] > 0 for row in rows) and rows[1]["train/grad_norm"] > 0
    (saved,) = (tmp_path / "run" / "checkpoints").glob("iter_*")
    assert (saved / ".metadata").is_file() and (saved / "critic" / ".metadata").is_file()
