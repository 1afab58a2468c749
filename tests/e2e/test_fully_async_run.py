"""Fully asynchronous training through real Ray, gRPC, HTTP and weight sync, as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_runs import metrics, run_command, timeless, write_inputs

NUM_GPUS = 0
# Metrics of generation as a whole, which a run without iterations does not have.
OF_A_CALL = ("rollout/non_generation_time", "rollout/dropped_stale")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_without_staleness_a_run_equals_the_synchronous_one_bit_for_bit(inputs: Path, tmp_path: Path) -> None:
    flags = ("--num-rollout", "4", "--deterministic")
    run_command("train", inputs, tmp_path / "sync", *flags)
    run_command("train-async", inputs, tmp_path / "async", *flags, "--fully-async", "--max-staleness", "0")
    sync, fully = (timeless(metrics(tmp_path / name)) for name in ("sync", "async"))
    for row in [*sync, *fully]:
        for name in OF_A_CALL:
            row.pop(name, None)
    assert fully == sync
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("sync", "async")]
    assert weights[0] == weights[1]
