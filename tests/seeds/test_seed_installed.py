"""Paths and programs that the seed documents name, from installed wheels: nothing here sees the checkout's packages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from clean_environment import ROOT, CleanEnvironment, clean_environment

HERE = Path(__file__).parent
LINES = [line for line in (HERE / "seed_paths.txt").read_text().splitlines() if line and not line.startswith("#")]
PRESENT = [line for line in LINES if not line.startswith("- ")]
ABSENT = [line.removeprefix("- ") for line in LINES if line.startswith("- ")]
PROGRAMS = sorted((ROOT / "tests" / "plugin_contracts").glob("test_plugin_*_contracts.py"))


def test_every_path_imports(installed: CleanEnvironment) -> None:
    code = "\n".join(f"from {module} import {', '.join(names.split())}" for module, _, names in map(split, PRESENT))
    installed.run(code)


def split(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


def test_paths_that_are_not_written_yet_are_listed_as_such(installed: CleanEnvironment) -> None:
    code = f"""
import importlib.util
def present(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print([name for name in {ABSENT!r} if present(name)])
"""
    assert installed.run(code).strip() == "[]"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The contract files where no pytest configuration of the checkout adds to the path."""
    root = tmp_path_factory.mktemp("elsewhere")
    for pattern in ("tests/plugin_contracts/*.py", "packages/rollout/tests/support/rollout_*.py"):
        for file in ROOT.glob(pattern):
            copy = root / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    return root / "tests" / "plugin_contracts"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_contract_file_runs_as_a_program(program: Path, elsewhere: Path, installed: CleanEnvironment) -> None:
    done = subprocess.run(
        [installed.python, elsewhere / program.name],
        cwd=elsewhere, env=clean_environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_there_are_four_contract_files() -> None:
    assert len(PROGRAMS) == 4
