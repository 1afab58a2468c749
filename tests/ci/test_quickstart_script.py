"""The script that makes an environment and runs the quickstart in it: nothing here is installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

NUM_GPUS = 0

# Stands in for Python: it logs what is installed, without a network, and fails where it is told to.
PYTHON = """#!/bin/bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *machine_settings.py*) echo UV_CONSTRAINT=/caps.txt; exit "${SETTINGS_CODE:-0}" ;;
  "-m pip "*" uv") exit "${FETCH_CODE:-0}" ;;
  "-m pip "*) echo "pip $*" >> "$LOG"; exit "${PIP_CODE:-0}" ;;
  "-m uv "*) echo "uv [$UV_CONSTRAINT] $PWD $*" >> "$LOG"; exit "${UV_CODE:-0}" ;;
  "-m slime.launcher.quickstart"*) echo ran >> "$LOG" ;;
  "-m slime.rollout.engines.embedded.dense"*) echo compiled >> "$LOG"; exit "${LOOPS_CODE:-0}" ;;
esac
"""
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


def install(directory: Path, **codes: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script in `directory` with the stand-in; returns the process and the lines that were logged."""
    stub, log = directory / "python", directory / "log"
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    variables = os.environ | {"SLIME_VENV": "venv", "PYTHON": str(stub), "LOG": str(log), **codes}
    process = subprocess.run(
        ["bash", SCRIPT, "--tiny"], cwd=directory, env=variables, capture_output=True, text=True, timeout=60
    )
    return process, log.read_text().splitlines() if log.exists() else []


def test_uv_installs_under_the_constraints_of_checkout_and_machine(tmp_path: Path) -> None:
    process, lines = install(tmp_path)
    assert process.returncode == 0 and lines[3:] == ["compiled", "ran"]
    assert all(line.startswith(f"uv [constraints.txt /caps.txt] {SCRIPT.parents[1]} ") for line in lines[:3])
    assert (tmp_path / "venv" / ".stamp").exists()


def test_loops_that_do_not_compile_do_not_end_the_script(tmp_path: Path) -> None:
    process, lines = install(tmp_path, LOOPS_CODE="1")
    assert process.returncode == 0 and lines[-1] == "ran"
    assert "loops were not compiled" in process.stderr


@pytest.mark.parametrize(
    ("code", "reason"),
    [("SETTINGS_CODE", "settings that uv lacks"), ("FETCH_CODE", "could not be installed"), ("UV_CODE", "uv failed")],
)
def test_pip_installs_where_uv_does_not(tmp_path: Path, code: str, reason: str) -> None:
    process, lines = install(tmp_path, **{code: "1"})
    assert process.returncode == 0 and lines[-1] == "ran" and reason in process.stderr
    assert sum(line.startswith("pip ") for line in lines) == 3


def test_an_installation_that_fails_ends_the_script(tmp_path: Path) -> None:
    process, lines = install(tmp_path, UV_CODE="1", PIP_CODE="3")
    assert process.returncode == 3 and "ran" not in lines
    assert not (tmp_path / "venv" / ".stamp").exists()
