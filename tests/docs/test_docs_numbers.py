"""The numbers that the README shows are those of the benchmark pages that it links, and their results can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pages import ROOT

NUM_GPUS = 0

README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+) \| \[\w+\]\((docs/benchmarks/\w+\.md)[#\w-]*\) \|$", README, re.M)


def test_the_table_of_measured_numbers_is_found() -> None:
    assert len(ROWS) >= 5


@pytest.mark.parametrize(("row", "page"), ROWS)
def test_a_number_of_the_readme_stands_on_the_page_that_it_links(row: str, page: str) -> None:
    numbers = re.findall(r"\d+\.\d+|\d{1,3}(?:,\d{3})+", row)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert numbers and [number for number in numbers if number not in text] == []


RESULTS = sorted((ROOT / "docs" / "benchmarks").rglob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_result_is_json(path: Path) -> None:
    assert json.loads(path.read_text(encoding="utf-8"))


def test_results_are_found() -> None:
    assert len(RESULTS) > 20
