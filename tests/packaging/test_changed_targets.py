"""Pants runs the tests that a branch affects, shown in a clone of this tree that has a remote."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slow_cases import slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("types", "buffer", "rollout", "converters", "trainer", "launcher")
UNWANTED = ("PYTHON", "PEX", "PANTS", "VIRTUAL_ENV", "GIT_")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(UNWANTED)}
# Each copy would leave a daemon of its own behind.
ENVIRONMENT["PANTS_PANTSD"] = "false"
ENVIRONMENT |= {f"GIT_{role}_{part}": "t@example.org" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
ENVIRONMENT |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def run(directory: Path, *command: str | Path, timeout: float = 280) -> str:
    done = subprocess.run(command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_the_tree(copy: Path) -> None:
    for name in ("pants", "pants.toml", "pyproject.toml", "constraints.txt", "BUILD"):
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__", "build", "dist", "*.egg-info", "runs", ".venv", "node_modules")
    for name in (
        "pants-macros",
        "pants-plugins",
        "3rdparty",
        "scripts",
        "packages",
        "proto",
        "tests",
        "benchmarks",
        "examples",
        ".github",
    ):
        if not (ROOT / name).exists():
            continue
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    (copy / "docs").mkdir()
    shutil.copy(ROOT / "docs/BUILD", copy / "docs")
    for name in ("docs/guide.md", "docs/flags.md", "docs/security.md", "README.md"):
        (copy / name).write_text("text\n")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This tree, committed and pushed to the main branch of a remote."""
    directory = tmp_path_factory.mktemp("changed")
    run(directory, "git", "init", "--quiet", "--bare", "--initial-branch=main", "remote.git")
    run(directory, "git", "clone", "--quiet", "remote.git", "clone")
    path = directory / "clone"
    copy_of_the_tree(path)
    run(path, "git", "checkout", "--quiet", "-b", "main")
    run(path, "git", "add", "--all", "--force")
    run(path, "git", "commit", "--quiet", "--message", "all")
    run(path, "git", "push", "--quiet", "origin", "main")
    return path


@pytest.fixture
def tests_after(clone: Path) -> Callable[..., list[str]]:
    """tests_after(files...): the test files that run on a branch which changed these."""

    def change(*names: str) -> list[str]:
        run(clone, "git", "checkout", "--quiet", "-B", "work", "origin/main")
        for name in names:
            with (clone / name).open("a") as file:
                file.write("\n")
        run(clone, "git", "commit", "--quiet", "--all", "--message", "change")
        flags = ("--changed-since=origin/main", "--changed-dependents=transitive", "--filter-target-type=python_test")
        return [line.partition(":")[0] for line in run(clone, clone / "pants", *flags, "list").splitlines()]

    return change


def of_packages(tests: list[str]) -> dict[str, int]:
    """Counts the tests of each package among them; packages with none are left out."""
    counts = {name: sum(test.startswith(f"packages/{name}/tests/") for test in tests) for name in PACKAGES}
    return {name: count for name, count in counts.items() if count}


def all_tests(clone: Path) -> dict[str, int]:
    return {name: len(list((clone / "packages" / name / "tests").rglob("test_*.py"))) for name in PACKAGES}


def test_a_package_runs_its_own_tests_and_those_of_its_dependents(tests_after, clone: Path) -> None:
    tests = tests_after("packages/buffer/slime/buffer/groups/leases.py")
    every = all_tests(clone)
    assert of_packages(tests) == {"buffer": every["buffer"], "launcher": every["launcher"]}
    assert "tests/e2e/training/test_tiny_run.py" in tests and "tests/packaging/test_wheels.py" in tests
    assert "tests/families/test_family_tables.py" not in tests


@slow
def test_the_messages_run_every_package(tests_after, clone: Path) -> None:
    tests = tests_after("proto/slime/v1/sample.proto")
    assert of_packages(tests) == all_tests(clone)
    assert "tests/packaging/test_generated_code.py" in tests and "tests/e2e/training/test_tiny_run.py" in tests


def test_docs_run_the_tests_of_docs_alone(tests_after, clone: Path) -> None:
    every = {str(path.relative_to(clone)) for path in (clone / "tests" / "docs").glob("test_*.py")}
    # It reads the packages' READMEs alone.
    every.remove("tests/docs/test_docs_first_examples.py")
    # They hold CONTRIBUTING.md's table against the tree, and the links of a release against the pages.
    every |= {"tests/packaging/test_files_to_touch.py", "tests/ci/test_workflows.py"}
    assert set(tests_after("docs/guide.md", "README.md")) == every
