"""`benchmarks/scale/curves.py`: its curves at small sizes, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

NUM_GPUS = 0

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scale" / "curves.py"
SIZES = ["--quick", "--engines", "4", "--readers", "1", "3", "--groups", "30", "300"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    return dict(os.environ, TMPDIR=str(tmp_path / "tmp"))


def test_curves_hold_every_size_with_what_each_process_took(tmp_path: Path, environment: dict[str, str]) -> None:
    argv = [sys.executable, str(SCRIPT), *SIZES, "--json", str(tmp_path / "out.json"), "--pictures", str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    (engines,) = report["engines"]
    assert engines["engines"] == 4 and engines["groups"] == 8
    assert 0 < engines["samples_per_s"] <= engines["ideal_per_s"]
    assert [row["readers"] for row in report["readers"]] == [1, 3]
    assert [row["groups"] for row in report["groups"]] == [30, 300]
    assert all(row["buffer_mib"] > 1 for part in ("engines", "readers", "groups") for row in report[part])
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"scale-{part}.png" for part in ("engines", "readers", "groups")
    }
    assert not list((tmp_path / "tmp").iterdir())


def test_an_interruption_leaves_no_process_and_no_file(tmp_path: Path, environment: dict[str, str]) -> None:
    argv = [sys.executable, str(SCRIPT), *SIZES]
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    # The first line comes while the services of the engines run.
    assert "4 engines" in process.stderr.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not list((tmp_path / "tmp").iterdir())


def test_a_size_of_nothing_is_refused() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--engines", "0"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--engines: must be a whole number above 0, got 0" in done.stderr
