"""Samples and state that a run keeps in its directory, for those who look at it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from slime.launcher.run_directory import kept_samples
from slime.launcher.run_directory.kept_samples import (
    DIRECTORY,
    MOST_FOOTERS,
    ROW_GROUP,
    SCHEMA,
    KeptSamples,
    count_rows,
    kept_files,
    read_rows,
    remove_kept,
)
from slime.launcher.run_directory.state import read_state, recorded
from slime.types import Sample
from slime.types.errors import DataLoss
from slime.types.sample import TokenSpan

PAGE = Path(__file__).parents[4] / "docs" / "runs.md"


def sample(index: int = 7, response: str = "43", reward: object = 0.5) -> Sample:
    made = Sample(
        group_index=3, index=index, prompt="34:", response=response, label="43", reward=reward, response_length=3,
        tokens=[5, 6, 7, 1, 2, 0], loss_mask=[1, 1, 0], rollout_log_probs=[-0.5, -0.25, -1.0],
        status=Sample.Status.COMPLETED, metadata={"rm_type": "integer"}, spans=[TokenSpan(0, 3, "policy", "2")],
    )  # fmt: skip
    made.trainer_log_probs = np.float32([-0.5, -0.5, -1.5])  # type: ignore[attr-defined]
    return made


def test_the_footer_of_a_file_is_read_once_until_a_run_writes_the_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []

    def read_metadata(file: object) -> object:
        read.append(file)
        return known(file)

    known = pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", read_metadata)
    log = KeptSamples(tmp_path, None)
    log.write(0, [sample(index) for index in range(ROW_GROUP + 1)])
    (file,) = kept_files(tmp_path)
    for row in (0, ROW_GROUP):
        assert [found["index"] for found in read_rows(file.path, ["index"], start=row, stop=row + 1)] == [row]
    assert count_rows(file.path) == ROW_GROUP + 1 and len(read) == 1
    log.write(0, [sample(5)])
    assert count_rows(file.path) == 1 and read_rows(file.path)[0]["index"] == 5 and len(read) == 2
    for step in range(1, MOST_FOOTERS + 1):
        log.write(step, [sample(step)])
        assert count_rows(kept_files(tmp_path)[step].path) == 1
    assert count_rows(file.path) == 1 and len(read) == 2 + MOST_FOOTERS + 1


def test_a_kept_sample_has_tokens_masks_and_both_log_probs(tmp_path: Path) -> None:
    held_out = sample(reward={"a": 1.0})
    held_out.dataset = "gsm"  # type: ignore[attr-defined]
    held_out.loss_mask = None
    log = KeptSamples(tmp_path, 0)
    log.write(2, [sample()])
    log.write(2, [held_out], evaluation=True)
    assert [(file.step, file.evaluation) for file in kept_files(tmp_path)] == [(2, True), (2, False)]
    of_eval, trained = (read_rows(file.path)[0] for file in kept_files(tmp_path))
    assert trained == {
        "step": 2, "dataset": "train", "group_index": 3, "index": 7, "prompt": "34:", "response": "43", "label": "43",
        "reward": 0.5, "reward_json": None, "status": "completed", "response_length": 3, "tokens": [5, 6, 7, 1, 2, 0],
        "loss_mask": [1, 1, 0], "engine_log_probs": [-0.5, -0.25, -1.0], "trainer_log_probs": [-0.5, -0.5, -1.5],
        "spans": [{"start": 0, "end": 3, "weight_version": "2"}], "metadata": '{"rm_type": "integer"}',
    }  # fmt: skip
    assert list(trained) == [name for name, _, _ in SCHEMA]
    assert (of_eval["dataset"], of_eval["reward"], of_eval["reward_json"]) == ("gsm", None, '{"a": 1.0}')
    assert of_eval["loss_mask"] is None


def test_samples_of_steps_that_are_done_again_are_written_anew(tmp_path: Path) -> None:
    log = KeptSamples(tmp_path, 0)
    log.write(0, [sample()], evaluation=True)
    for step in range(4):
        log.write(step, [sample()])
        log.write(step + 1, [sample()], evaluation=True)
    (tmp_path / DIRECTORY / "notes.txt").write_text("mine")
    KeptSamples(tmp_path, None)
    assert len(kept_files(tmp_path)) == 9
    KeptSamples(tmp_path, 2).write(2, [sample(response="again")])
    assert [(f.step, f.evaluation) for f in kept_files(tmp_path)] == [
        (0, True), (0, False), (1, True), (1, False), (2, True), (2, False),
    ]  # fmt: skip
    assert read_rows(kept_files(tmp_path)[-1].path)[0]["response"] == "again"
    remove_kept(tmp_path)
    assert [path.name for path in (tmp_path / DIRECTORY).iterdir()] == ["notes.txt"]


def test_pages_of_a_large_file_are_read_by_row(tmp_path: Path) -> None:
    KeptSamples(tmp_path, 0).write(0, [sample(index) for index in range(2 * ROW_GROUP + 10)])
    path = kept_files(tmp_path)[0].path
    assert count_rows(path) == 2 * ROW_GROUP + 10
    for start, stop in ((0, 5), (ROW_GROUP - 2, ROW_GROUP + 2), (2 * ROW_GROUP + 8, 3 * ROW_GROUP), (9999, 10000)):
        found = [row["index"] for row in read_rows(path, ["index"], start=start, stop=stop)]
        assert found == list(range(start, min(stop, 2 * ROW_GROUP + 10)))


def test_no_thread_but_the_caller_s_reads_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeptSamples(tmp_path, 0).write(0, [sample(index) for index in range(5)])
    readers = set()

    class Recorded(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            readers.add(threading.current_thread())
            return super().read(size)

    monkeypatch.setattr("slime.launcher.run_directory.kept_samples.open_regular", Recorded)
    assert len(read_rows(kept_files(tmp_path)[0].path)) == 5
    assert readers == {threading.current_thread()}


def test_samples_are_written_beside_the_loop_and_a_full_disk_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, go_on, write = KeptSamples(tmp_path, 0), threading.Event(), kept_samples.write_file

    def write_late(*arguments: Any) -> None:
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(kept_samples, "write_file", write_late)
    log.begin(0, [sample()])
    assert kept_files(tmp_path) == []
    go_on.set()
    log.begin(1, [sample()])
    log.wait()
    assert [file.step for file in kept_files(tmp_path)] == [0, 1]

    def fail(*_: Any) -> None:
        raise DataLoss("no space left")

    monkeypatch.setattr(kept_samples, "write_file", fail)
    log.begin(2, [sample()])
    with pytest.raises(DataLoss, match="no space left"):
        log.begin(3, [sample()])
    log.wait()


def test_the_page_lists_the_columns() -> None:
    rows = [line.split("|")[1:4] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    listed = [tuple(cell.strip() for cell in row) for row in rows]
    assert [row for row in listed if row[0] in {f"`{name}`" for name, _, _ in SCHEMA}] == [
        (f"`{name}`", kind, meaning) for name, kind, meaning in SCHEMA
    ]


def test_the_state_of_a_run_is_what_its_end_was(tmp_path: Path) -> None:
    assert read_state(tmp_path).state == "unknown"
    with recorded(tmp_path, "train") as state:
        assert (read_state(tmp_path).state, read_state(tmp_path).phase) == ("running", "starting")
        state.phase("started", num_steps=5)
        assert (read_state(tmp_path).phase, read_state(tmp_path).num_steps) == ("started", 5)
    assert read_state(tmp_path).state == "done"
    for error, expected in ((KeyboardInterrupt(), "stopped"), (ValueError("no engine"), "failed")):
        with pytest.raises(type(error)), recorded(tmp_path, "train"):
            raise error
        assert read_state(tmp_path).state == expected
    assert read_state(tmp_path).error == "ValueError: no engine"


def test_a_run_whose_process_is_gone_has_failed(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\nfrom slime.launcher.run_directory.state import RunState\n"
        "RunState(pathlib.Path(sys.argv[1]), 'train').phase('generating')\nos._exit(9)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False).returncode == 9
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "running"
    state = read_state(tmp_path)
    assert state.state == "failed" and "its process ended without an error message" in str(state.error)
