"""The script that makes an environment and runs the quickstart in it: nothing here is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

NUM_GPUS = 0

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "quickstart"


def run(environment: Path, *words: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"SLIME_VENV": str(environment), "PYTHON": "false", "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", SCRIPT, *words], env=variables, capture_output=True, text=True, timeout=60)


def test_an_environment_of_somebody_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("mine")
    refused = run(tmp_path)
    assert refused.returncode == 1 and "SLIME_VENV=DIR" in refused.stderr
    assert f"{tmp_path} was not made by this script" in refused.stderr
    assert (tmp_path / "pyvenv.cfg").read_text() == "mine"


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_installs_nothing(tmp_path: Path, word: str) -> None:
    helped = run(tmp_path / "environment", "--tiny", word)
    assert helped.returncode == 0 and "scripts/quickstart [--tiny]" in helped.stdout
    assert not list(tmp_path.iterdir())
