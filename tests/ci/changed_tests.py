"""The tests that a branch adds or changes, as a matrix for GitHub Actions: the program behind `run-ci-changed`.

    changed_tests.py                    matrix={"info": [{"test_file": ..., "num_gpus": ...}]} and has_tests=true
    changed_tests.py --run FILE         runs one of them, on as many GPUs as it asks for

The two lines go to $GITHUB_OUTPUT, where it is set, and to the terminal. Compared are `origin/main` and HEAD, from
where they parted; what counts is committed. How many GPUs: see declared_gpus.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from declared_gpus import NotANumber, command, num_gpus, runs_directly

GLOBS = (
    "tests/test_*.py",
    "tests/plugin_contracts/test_*.py",
    "tests/gpu/test_*.py",
    "tests/e2e/**/test_*.py",
    "packages/*/tests/**/test_*.py",
)
GIT_SECONDS = 120


class Test(TypedDict):
    test_file: str
    num_gpus: int


class GitFailed(RuntimeError):
    """Returns what git printed."""


def changed_files(base: str) -> list[str]:
    """Added or changed files of GLOBS, by name. A renamed one counts as added. Raises GitFailed."""
    # git's own * also matches "/", but for this magic word.
    globs = [f":(top,glob){pattern}" for pattern in GLOBS]
    options = ("--name-only", "-z", "--no-renames", "--no-relative", "--diff-filter=AM")
    listing = _git("diff", *options, f"{base}...HEAD", "--", *globs).decode(errors="replace")
    return sorted(name for name in listing.split("\0") if name)


def find(base: str) -> list[Test]:
    """Raises GitFailed, NotANumber."""
    return [
        {"test_file": name, "num_gpus": num_gpus(name, _git("show", f"HEAD:{name}"))} for name in changed_files(base)
    ]


def outputs(tests: Sequence[Test]) -> str:
    matrix = json.dumps({"info": list(tests)}, separators=(",", ":"))
    return f"matrix={matrix}\nhas_tests={'true' if tests else 'false'}\n"


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], capture_output=True, timeout=GIT_SECONDS)
    if done.returncode:
        raise GitFailed(f"git {arguments[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def run(path: str) -> None:
    """Replaces this process by the test."""
    source = Path(path).read_bytes()
    words = command(path, num_gpus(path, source), runs_directly(source))
    print("EXEC:", *words, flush=True)
    os.execvp(sys.executable, [sys.executable, *words[1:]])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="changed_tests.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="origin/main", help="Compare with this branch (default: origin/main)")
    parser.add_argument("--run", metavar="FILE", help="Run this test file")
    options = parser.parse_args(arguments)
    try:
        if options.run:
            run(options.run)
        text = outputs(find(options.base))
    except (GitFailed, NotANumber, OSError, SyntaxError) as error:
        print(f"changed_tests.py: error: {error}", file=sys.stderr)
        return 1
    if path := os.environ.get("GITHUB_OUTPUT"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
