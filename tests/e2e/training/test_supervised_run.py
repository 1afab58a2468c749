"""Supervised fine-tuning on conversations, through all services: `slime.rollout.sft_rollout.generate_rollout`."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from slime.launcher.quickstart import reverse
from slow_cases import slow
from tiny_runs import DEADLINE, evaluations, metrics

NUM_GPUS = 0

# "407>" is what a user says, "704<eos>" the answer.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{{ '>' if message.role == 'user' else '<eos>' }}{% endfor %}"
)
ITERATIONS = 80


def write_data(directory: Path, seed: int = 0) -> list[str]:
    """Writes a model and conversations; returns the flags that both runs share."""
    model = reverse.write_model(directory / "model", seed)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    numbers = [f"{n:03d}" for n in range(1000)]
    random.Random(seed).shuffle(numbers)
    with (directory / "train.jsonl").open("w") as train:
        for n in numbers[64:]:
            turns = [{"role": "user", "content": n}, {"role": "assistant", "content": n[::-1]}]
            print(json.dumps({"messages": turns, "label": n[::-1]}), file=train)
    with (directory / "held_out.jsonl").open("w") as held_out:
        for n in numbers[:64]:
            print(json.dumps({"messages": [{"role": "user", "content": n}], "label": n[::-1]}), file=held_out)
    return [
        "--output-dir", str(directory / "run"), "--hf-checkpoint", str(model),
        "--prompt-data", str(directory / "train.jsonl"), "--input-key", "messages",
        "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss",
        "--disable-compute-advantages-and-returns", "--calculate-per-token-loss", "--n-samples-per-prompt", "1",
        "--rollout-batch-size", "64", "--lr", "5e-3", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096",
        "--deterministic",
    ]  # fmt: skip


def slime(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slime.launcher.cli", *words],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=slow), pytest.param(2, marks=slow)])
def test_conversations_teach_the_model_without_any_reward(tmp_path: Path, seed: int) -> None:
    flags = write_data(tmp_path, seed)
    slime(
        "train", *flags, "--label-key", "label", "--num-rollout", str(ITERATIONS), "--num-steps-per-rollout", "2",
        "--apply-chat-template", "--eval-prompt-data", "reverse", str(tmp_path / "held_out.jsonl"),
        "--custom-rm-path", "slime.launcher.quickstart.reverse.reward", "--rollout-max-response-len", "4",
        "--update-weights-interval", str(ITERATIONS),
        # Processors round differently: at a rate that stays high, the last step of some is a bad one.
        "--lr-decay-style", "cosine", "--min-lr", "1e-4",
    )  # fmt: skip
    losses = [row["train/loss"] for row in metrics(tmp_path / "run")]
    assert losses[0] > 2.0 and losses[-1] < 0.1, losses
    rewards = [row["eval/reverse"] for row in evaluations(tmp_path / "run")]
    assert rewards[0] < 0.2 and rewards[-1] > 0.9, rewards


def test_a_run_that_only_trains_starts_no_engine_and_lowers_the_learning_rate_over_its_epochs(tmp_path: Path) -> None:
    flags = write_data(tmp_path)
    slime(
        "train-async", *flags, "--debug-train-only", "--num-epoch", "2", "--global-batch-size", "32",
        "--lr-decay-style", "cosine", "--min-lr", "1e-4", "--lr-warmup-fraction", "0.1",
    )  # fmt: skip
    rows = metrics(tmp_path / "run")
    assert len(rows) == 2 * (936 // 64)
    assert rows[-1]["train/loss"] < 0.5 * rows[0]["train/loss"]
    rates = [row["train/lr-pg_0"] for row in rows]
    # 56 updates, two an iteration; the warm-up is a tenth of them.
    assert rates[:3] == sorted(rates[:3]) and rates[3:] == sorted(rates[3:], reverse=True), rates
    assert 1e-4 < rates[-1] < 2e-4, rates
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert "rollout.log" in logs and not [name for name in logs if "engine" in name or "embedded" in name], logs
