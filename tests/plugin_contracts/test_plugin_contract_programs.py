"""The files of contracts as programs: `python FILE --custom-rm-path PATH` says whether a user's plug-in keeps them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract_runs import main, variable

NUM_GPUS = 0

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("test_plugin_*_contracts.py"))
KEEPS = "async def score(args, sample, **kwargs):\n    return 0.5\n"
BREAKS = "async def score(args, sample, **kwargs):\n    return 'good'\n"


def program(name: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    command = [sys.executable, HERE / name, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_is_a_program_for_a_cpu(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    constants = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    assert "NUM_GPUS = 0" in [ast.unparse(node) for node in constants]
    assert source.endswith('if __name__ == "__main__":\n    sys.exit(main(__file__, sys.argv[1:]))\n')


@pytest.mark.parametrize(("source", "status"), [(KEEPS, 0), (BREAKS, 1)])
def test_a_users_plug_in_keeps_its_contract_or_breaks_it(tmp_path: Path, source: str, status: int) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    name = "test_plugin_runtime_hook_contracts.py"
    done = program(name, "-k", "reward_of_one_sample and mine", "--custom-rm-path", file)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("1 passed" if status == 0 else "expected a finite number") in done.stdout


def test_a_plug_in_may_be_named_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KEEPS)
    variables = {variable("--custom-rm-path"): f"{tmp_path / 'mine.py'}:missing"}
    done = program("test_plugin_path_loading_contracts.py", "-k", "mine", **variables)
    assert done.returncode == 1 and "has no 'missing'" in done.stdout
    assert list(variables) == ["SLIME_TEST_CUSTOM_RM_PATH"]


def test_a_flag_without_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("a.py", ["--custom-rm-path"]) == 2
    assert "--custom-rm-path: expected a path" in capsys.readouterr().err


if __name__ == "__main__":
    sys.exit(main(__file__, sys.argv[1:]))
