"""Adds up pytest's XML reports:  count_tests.py DIRECTORY

Prints `N passed, M failed, K skipped`, after the names of what failed. Exits 1 where a test failed or none ran.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path


def count(directory: Path) -> tuple[int, list[str], int]:
    """Returns the number passed, the names of failed tests and the number skipped."""
    passed, failed, skipped = 0, [], 0
    for report in sorted(directory.glob("**/*.xml")):
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}::{case.get('name')}")
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
    return passed, failed, skipped


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="Directory below which the reports lie")
    passed, failed, skipped = count(parser.parse_args(arguments).directory)
    for name in failed:
        print(f"failed: {name}")
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
