"""Runs the property tests with random examples, where the tests of a push draw the same ones each time.

    property_tests.py [ARGUMENTS OF PYTEST]

A failure prints the line that draws its example again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
PROFILE = "random"
EXAMPLES = 300


def files() -> Iterator[str]:
    """Yields the test files that import hypothesis."""
    for folder in ("packages", "tests"):
        for path in sorted((ROOT / folder).glob("**/test_*.py")):
            if "from hypothesis import" in path.read_text(encoding="utf-8"):
                yield str(path)


def main(arguments: Sequence[str]) -> int:
    settings.register_profile(PROFILE, derandomize=False, deadline=None, print_blob=True, max_examples=EXAMPLES)
    return pytest.main(["-m", "hypothesis", f"--hypothesis-profile={PROFILE}", *(arguments or files())])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
