"""Finds the tests that a branch adds or changes, in a clone of a real remote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import declared_gpus

PROGRAM = str(Path(__file__).with_name("changed_tests.py"))
TEST = "NUM_GPUS = 2\n\n\ndef test_it():\n    pass\n"
IDENTITY = {f"GIT_{role}_{part}": "t@example.org" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | IDENTITY
ENVIRONMENT |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
ENVIRONMENT.pop("GITHUB_OUTPUT", None)


def git(directory: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=directory, env=ENVIRONMENT, check=True, capture_output=True, timeout=60)


def write(clone: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)


def commit(clone: Path, files: dict[str, str]) -> None:
    write(clone, files)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "change")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone on a branch of its own, after its remote's main has moved on."""
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", "remote.git")
    git(tmp_path, "clone", "--quiet", "remote.git", "clone")
    path = tmp_path / "clone"
    git(path, "checkout", "--quiet", "-b", "main")
    commit(path, {"tests/test_old.py": TEST, "tests/test_going.py": TEST, "README.md": "r", "tests/test_same.py": TEST})
    git(path, "push", "--quiet", "origin", "main")
    git(path, "checkout", "--quiet", "-b", "work")
    git(path, "checkout", "--quiet", "main")
    commit(path, {"tests/test_of_others.py": TEST})
    git(path, "push", "--quiet", "origin", "main")
    git(path, "checkout", "--quiet", "work")
    return path


@pytest.fixture
def detect(clone: Path) -> Callable[..., tuple[bool, list[tuple[str, int]]]]:
    """has_tests, and (file, GPUs) of the matrix."""

    def run() -> tuple[bool, list[tuple[str, int]]]:
        output = clone.parent / "output"
        output.write_text("before=1\n")
        done = subprocess.run(
            [sys.executable, PROGRAM], cwd=clone, env=ENVIRONMENT | {"GITHUB_OUTPUT": str(output)},
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert output.read_text() == "before=1\n" + done.stdout
        values = dict(line.split("=", 1) for line in done.stdout.splitlines())
        info = json.loads(values["matrix"])["info"]
        assert all(set(entry) == {"test_file", "num_gpus"} for entry in info)
        return values["has_tests"] == "true", [(entry["test_file"], entry["num_gpus"]) for entry in info]

    return run


def test_nothing_changed(detect, clone: Path) -> None:
    assert detect() == (False, [])
    commit(clone, {"README.md": "other", "packages/a/slime/a.py": "x = 1\n", "tests/tools.py": "x = 1\n"})
    assert detect() == (False, [])


def test_added_and_changed_tests_of_every_directory(detect, clone: Path) -> None:
    (clone / "tests/test_going.py").unlink()
    git(clone, "mv", "tests/test_same.py", "tests/test_renamed.py")
    commit(
        clone,
        {
            "tests/test_old.py": TEST.replace("2", "4"),
            "tests/gpu/test_card.py": TEST,
            "tests/plugin_contracts/test_mine.py": TEST.replace("2", "0"),
            "tests/e2e/faults/test_run.py": "def test_it():\n    pass\n",
            "packages/buffer/tests/test_buffer_x.py": "def test_it():\n    pass\n",
            "packages/trainer/tests/test_trainer_x.py": TEST.replace("2", "1"),
            "packages/buffer/tests/support/buffer_samples.py": TEST,
            "packages/buffer/tests/store/deep/test_deeper.py": "x = 1\n",
            "tests/test_of_a_directory/test_deeper.py": TEST,
            "tests/utils/test_tool.py": TEST,
        },
    )
    assert detect() == (
        True,
        [
            ("packages/buffer/tests/store/deep/test_deeper.py", 0),
            ("packages/buffer/tests/test_buffer_x.py", 0),
            ("packages/trainer/tests/test_trainer_x.py", 1),
            ("tests/e2e/faults/test_run.py", 0),
            ("tests/gpu/test_card.py", 2),
            ("tests/plugin_contracts/test_mine.py", 0),
            ("tests/test_old.py", 4),
            ("tests/test_renamed.py", 2),
        ],
    )


def test_a_missing_constant_is_the_default(detect, clone: Path) -> None:
    """And no end of the whole, which a failing grep makes of it under `bash -e`."""
    commit(clone, {"tests/test_silent.py": "x = 1\n", "tests/gpu/test_silent_too.py": '"""NUM_GPUS = 3"""\n'})
    assert detect() == (True, [("tests/gpu/test_silent_too.py", 8), ("tests/test_silent.py", 8)])


def test_what_is_not_committed_does_not_count(detect, clone: Path) -> None:
    commit(clone, {"tests/test_new.py": TEST})
    write(clone, {"tests/test_new.py": TEST.replace("2", "6"), "tests/test_newer.py": TEST})
    assert detect() == (True, [("tests/test_new.py", 2)])


def test_names_that_a_shell_would_take_apart(detect, clone: Path) -> None:
    name = "tests/test_a b'$(date)ü.py"
    commit(clone, {name: TEST})
    assert detect() == (True, [(name, 2)])


def test_files_that_say_how_they_are_encoded(detect, clone: Path) -> None:
    (clone / "tests/test_marked.py").write_bytes(b"\xef\xbb\xbf" + TEST.encode())
    (clone / "tests/test_latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n" + TEST.encode())
    commit(clone, {})
    assert detect() == (True, [("tests/test_latin.py", 2), ("tests/test_marked.py", 2)])
    for name in ("test_marked", "test_latin"):
        command = [sys.executable, PROGRAM, "--run", f"tests/{name}.py"]
        done = subprocess.run(command, cwd=clone, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        assert "EXEC: python tests/ci/gpu_lock_exec.py --count 2" in done.stdout, done.stderr


def test_names_are_those_of_the_whole_repository(clone: Path) -> None:
    commit(clone, {"tests/test_new.py": TEST})
    git(clone, "config", "diff.relative", "true")
    done = subprocess.run(
        [sys.executable, PROGRAM], cwd=clone / "tests", env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert '"tests/test_new.py"' in done.stdout, done.stderr


@pytest.mark.parametrize("value", ["int('4')", "-1", "'4'", "True", "4.0"])
def test_a_constant_that_is_no_number_is_an_error(clone: Path, value: str) -> None:
    commit(clone, {"tests/test_odd.py": f"NUM_GPUS = {value}\n"})
    done = subprocess.run(
        [sys.executable, PROGRAM], cwd=clone, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "tests/test_odd.py:1" in done.stderr and not done.stdout


def test_a_remote_branch_that_is_not_there(clone: Path) -> None:
    command = [sys.executable, PROGRAM, "--base", "origin/none"]
    done = subprocess.run(command, cwd=clone, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "origin/none" in done.stderr


@pytest.mark.parametrize(
    ("source", "gpus"),
    [
        ("NUM_GPUS = 4", 4),
        ("NUM_GPUS: int = 4", 4),
        ("NUM_GPUS=0  # on a CPU", 0),
        ("def f():\n    NUM_GPUS = 1", 8),
        ("'''\nNUM_GPUS = 1\n'''", 8),
        ("def broken(", 8),
    ],
)
def test_where_the_number_is_read(source: str, gpus: int) -> None:
    assert declared_gpus.num_gpus("tests/test_x.py", source) == gpus


def test_a_test_is_run_as_it_can_be(tmp_path: Path) -> None:
    direct = 'NUM_GPUS = 0\nif __name__ == "__main__":\n    print("directly")\n'
    by_pytest = "NUM_GPUS = 0\n\n\ndef test_it():\n    print('by pytest')\n"
    write(tmp_path, {"direct.py": direct, "test_plain.py": by_pytest})
    for name, shown in (("direct.py", "directly"), ("test_plain.py", "1 passed")):
        command = [sys.executable, PROGRAM, "--run", name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and shown in done.stdout, done.stderr
    assert declared_gpus.command("tests/gpu/test_x.py", 2, True, ("--fast",)) == [
        "python", "tests/ci/gpu_lock_exec.py", "--count", "2", "--", "python", "tests/gpu/test_x.py", "--fast",
    ]  # fmt: skip
