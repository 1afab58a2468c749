"""One half of the system alone: recording what is generated, training on what was recorded."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from slime.rollout.recordings.rollouts import read_rollout
from slime.types import Sample
from tiny_runs import evaluations, metrics, run_command, write_inputs

TEMPLATE = "{rollout_id}.pt"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def training(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key.startswith("train/")} for row in rows]


def test_training_on_what_a_run_recorded_is_what_the_run_did(inputs: Path, tmp_path: Path) -> None:
    recorded = str(tmp_path / "recorded" / TEMPLATE)
    flags = ("--num-rollout", "3", "--deterministic")
    run_command("train", inputs, tmp_path / "run", *flags, "--save-debug-rollout-data", recorded)
    output = run_command("train", inputs, tmp_path / "again", *flags, "--load-debug-rollout-data", recorded)
    assert training(metrics(tmp_path / "again")) == training(metrics(tmp_path / "run"))
    assert not list((tmp_path / "again" / "logs").glob("rollout*")), "no engine is started"
    assert "trained model" in output
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("run", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_without_a_trainer_records_an_epoch_and_its_evaluations(inputs: Path, tmp_path: Path) -> None:
    prompts, held = str(inputs / "train.jsonl") + "@[0:17]", str(inputs / "held_out.jsonl") + "@[0:4]"
    output = run_command(
        "train", inputs, tmp_path / "run", "--debug-rollout-only", "--num-epoch", "1", "--prompt-data", prompts,
        "--dump-details", str(tmp_path / "details"), "--eval-prompt-data", "held", held, "again", held,
        "--n-samples-per-eval-prompt", "2", "--log-passrate", "--start-rollout-id", "1",
    )  # fmt: skip
    assert not list((tmp_path / "run" / "logs").glob("trainer*")) and "trained model" not in output
    (row,) = metrics(tmp_path / "run")
    assert row["step"] == 1 and "train/loss" not in row
    held_out = evaluations(tmp_path / "run")
    assert [row["step"] for row in held_out] == [1, 2]
    for row, name in itertools.product(held_out, ("held", "again")):
        for key in ("", "-truncated_ratio", "-response_length", "-pass@1", "-pass@2"):
            assert f"eval/{name}{key}" in row
    files = sorted(path.name for path in (tmp_path / "details" / "rollout_data").iterdir())
    assert files == ["1.rollout", "eval_1.rollout", "eval_2.rollout"]
    rollout = read_rollout(tmp_path / "details" / "rollout_data" / "1.rollout")
    assert rollout.rollout_id == 1 and [len(group.samples) for group in rollout.groups] == [4] * 8
    assert all(sample.reward is not None for group in rollout.groups for sample in group.samples)
    evaluation = read_rollout(tmp_path / "details" / "rollout_data" / "eval_2.rollout")
    assert [group.dataset for group in evaluation.groups] == ["held"] * 4 + ["again"] * 4


def test_samples_that_torch_saved_are_trained_on(inputs: Path, tmp_path: Path) -> None:
    def response(index: int) -> dict:
        sample = Sample(
            group_index=index // 4, index=index, prompt="12>", response="21", response_length=2, label="21",
            reward=float(index % 2), status=Sample.Status.COMPLETED,
        ).to_dict()  # fmt: skip
        return sample | {"tokens": [3, 4, 12, 4, 3 + index % 2], "rollout_log_probs": [-1.0, -2.0], "loss_mask": [1, 1]}

    torch.save({"rollout_id": 4, "samples": [response(index) for index in range(32)]}, tmp_path / "4.pt")
    run_command(
        "train", inputs, tmp_path / "run", "--debug-train-only", "--start-rollout-id", "4", "--num-rollout", "5",
        "--load-debug-rollout-data", str(tmp_path / TEMPLATE), "--load-debug-rollout-data-subsample", "0.5",
    )  # fmt: skip
    (row,) = metrics(tmp_path / "run")
    assert row["step"] == 4 and row["rollout/raw_reward"] == 0.5 and row["train/grad_norm"] > 0
    assert row["train/micro_batches"] == 16
