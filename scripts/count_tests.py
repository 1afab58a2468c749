"""Adds up pytest's XML reports:  count_tests.py DIRECTORY

Prints `N passed, M failed, K skipped`, after what failed and why: a long log may be cut before its reader sees the
reasons in it. Exits 1 where a test failed or none ran.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

# A reason may hold the output of a process.
FIRST_CHARACTERS, LAST_CHARACTERS = 500, 1500


def count(directory: Path) -> tuple[int, dict[str, str], int]:
    """Returns the number passed, the reasons of failed tests by name, and the number skipped."""
    passed, failed, skipped = 0, dict[str, str](), 0
    for report in sorted(directory.glob("**/*.xml")):
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            failures = [*case.findall("failure"), *case.findall("error")]
            if failures:
                failed[f"{case.get('classname')}::{case.get('name')}"] = failures[0].get("message", "")
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
    return passed, failed, skipped


def shortened(reason: str) -> str:
    """Returns the first and the last characters of a long reason."""
    if len(reason) <= FIRST_CHARACTERS + LAST_CHARACTERS:
        return reason
    return f"{reason[:FIRST_CHARACTERS]} […] {reason[-LAST_CHARACTERS:]}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="Directory below which the reports lie")
    passed, failed, skipped = count(parser.parse_args(arguments).directory)
    # Tests of one fixture fail for one reason.
    for reason in dict.fromkeys(failed.values()):
        for name in (name for name, own in failed.items() if own == reason):
            print(f"failed: {name}")
        print(textwrap.indent(shortened(reason), "  "))
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
