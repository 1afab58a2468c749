"""A file of samples that is damaged while the run lasts costs its group, not the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slow_cases import slow
from tiny_runs import command, finish, metrics, write_inputs

# Called when the groups of a rollout are complete, before they are sealed.
DAMAGE = """
from pathlib import Path


def log(rollout_id, args, samples, metrics, seconds):
    last = max(sample.group_index for sample in samples)
    if rollout_id == 1 and len(samples) > args.n_samples_per_prompt:
        path = next(Path({buffer!r}).glob(f"payloads/*/{{last:010d}}-*"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    return False
"""


@pytest.mark.parametrize("name", ["train", pytest.param("train-async", marks=slow)])
def test_a_damaged_group_is_generated_again(tmp_path: Path, name: str) -> None:
    buffer = tmp_path / "buffer"
    (tmp_path / "damage.py").write_text(DAMAGE.format(buffer=str(buffer)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    process = command(
        name, write_inputs(tmp_path / "inputs"), tmp_path / "run", "--num-rollout", "4", "--buffer-dir", str(buffer),
        "--custom-rollout-log-function-path", "damage.log", env=environment,
    )  # fmt: skip
    output = finish(process)
    assert process.returncode == 0, output
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row.get("train/data_loss_retries") for row in rows] == [None, 1, None, None]
    assert "generating 1 group in place of damaged ones" in output
