"""Smoke test of a whole training, in the form of the end-to-end tests: a model of two layers, on the CPU.

python tests/test_tiny_short.py
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import slime.utils.external_utils.command_utils as U
from slime.launcher.quickstart import reverse

MODEL_NAME = "tiny-reverse"
MODEL_TYPE = None
NUM_GPUS = 0
STEPS = 2
PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")


def prepare(directory: Path) -> None:
    """Makes the model and the data; nothing is downloaded."""
    reverse.write_data(directory, seed=0)
    reverse.write_model(directory / MODEL_NAME, seed=0)


def execute(directory: Path) -> None:
    ckpt_args = f"--hf-checkpoint {directory / MODEL_NAME} "
    rollout_args = (
        f"--prompt-data {directory / 'train.jsonl'} "
        "--input-key prompt "
        "--label-key label "
        "--custom-rm-path slime.launcher.quickstart.reverse.reward "
        f"--num-rollout {STEPS} "
        "--rollout-batch-size 4 "
        "--n-samples-per-prompt 4 "
        f"--rollout-max-response-len {reverse.DIGITS + 1} "
        "--rollout-engine embedded "
    )
    eval_args = (
        f"--eval-prompt-data reverse {directory / 'held_out.jsonl'} "
        "--n-samples-per-eval-prompt 1 "
        "--eval-temperature 0 "
        "--skip-eval-before-train "
        "--eval-interval 100 "
    )
    optimizer_args = "--lr 1e-3 --weight-decay 0 "
    misc_args = f"--output-dir {directory / 'run'} --ray-num-cpus 2 "
    U.execute_train(
        train_args=ckpt_args + rollout_args + eval_args + optimizer_args + misc_args,
        num_gpus_per_node=NUM_GPUS,
        megatron_model_type=MODEL_TYPE,
    )


def test_a_tiny_model_trains_and_is_evaluated(tmp_path: Path) -> None:
    prepare(tmp_path)
    execute(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(STEPS))
    assert all(row["train/grad_norm"] > 0 for row in rows if "train/loss" in row)
    assert "reverse" in (tmp_path / "run" / "eval.json").read_text()
    assert (tmp_path / "run" / "model" / "config.json").is_file()


if __name__ == "__main__":
    for proxy in PROXIES:
        os.environ.pop(proxy, None)
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(made))
        execute(Path(made))
