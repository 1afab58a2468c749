"""A file of samples that is damaged while the run lasts costs its group, not the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slow_cases import slow
from tiny_runs import command, finish, metrics, write_inputs

# Called when the groups of a rollout are complete, before they are sealed.
DAMAGE = """
import sqlite3
from contextlib import closing
from pathlib import Path

BUFFER = Path({buffer!r})


def log(rollout_id, args, samples, metrics, seconds):
    if rollout_id == 1 and len(samples) > args.n_samples_per_prompt:
        last = max(sample.group_index for sample in samples)
        with closing(sqlite3.connect(BUFFER / "state.sqlite")) as state:
            (name,) = state.execute("SELECT payload FROM groups WHERE group_index = ?", (last,)).fetchone()
        # Groups that were completed together share a file, and each has a span of it.
        file, _, span = name.partition("@")
        path = BUFFER / "payloads" / file
        data = bytearray(path.read_bytes())
        _, offset, size = map(int, span.split(".")) if span else (0, 0, len(data))
        data[offset + size // 2] ^= 1
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
