"""A user's data source feeds a run, and goes on where a checkpoint has it."""

from __future__ import annotations

import json
from pathlib import Path

from tiny_runs import metrics, run

SOURCE = """
import json
from pathlib import Path

from slime.data import RolloutDataSourceWithBuffer

class Counted(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        groups = super().get_samples(num_samples)
        with Path(__file__).with_suffix(".log").open("a") as log:
            print(json.dumps([self.sample_offset, *(group[0].prompt for group in groups)]), file=log)
        return groups
"""


def test_a_run_goes_on_where_its_data_source_was(tmp_path: Path) -> None:
    source, out = tmp_path / "source.py", tmp_path / "out"
    source.write_text(SOURCE)
    own = ("--data-source-path", f"{source}:Counted", "--save-interval", "1", "--rollout-batch-size", "4")
    run(out, "--num-rollout", "2", *own)
    run(out, "--num-rollout", "3", "--load", str(out / "checkpoints"), *own)
    rows = [json.loads(line) for line in source.with_suffix(".log").read_text().splitlines()]
    assert [row[0] for row in rows] == [4, 8, 12]
    prompts = [prompt for row in rows for prompt in row[1:]]
    assert len(set(prompts)) == 12, "each prompt of the epoch once"
    assert [row["step"] for row in metrics(out)] == [0, 1, 2]
