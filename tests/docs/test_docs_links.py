"""Every link and anchor of every page leads somewhere, and every page can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from pages import ROOT, anchors, links, pages

NUM_GPUS = 0

INDEX = ROOT / "docs" / "index.md"


def targets(page: Path) -> Iterator[tuple[str, Path, str]]:
    """(link, file, anchor) of the links of a page that lead into the repository."""
    for link in links(page):
        if "://" not in link and not link.startswith("mailto:"):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / unquote(path)).resolve() if path else page, anchor


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    broken = []
    for link, target, anchor in targets(page):
        if not target.exists() or not target.is_relative_to(ROOT):
            broken.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{link} (no such heading)")
    assert not broken


def test_every_page_can_be_reached_from_the_index() -> None:
    seen, waiting = set(), [INDEX]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for _, target, _ in targets(page):
            entry = target / "README.md" if target.is_dir() else target
            if entry.suffix == ".md" and entry.exists():
                waiting.append(entry)
    assert [str(page.relative_to(ROOT)) for page in pages() if page not in seen] == []


def test_every_result_of_a_benchmark_is_linked_by_a_page() -> None:
    linked = {target for page in pages() for _, target, _ in targets(page)}
    results = [path for path in (ROOT / "docs" / "benchmarks").glob("*/*") if path.suffix in (".json", ".png")]
    assert results
    assert [str(path.relative_to(ROOT)) for path in sorted(results) if path not in linked] == []


def test_the_index_itself_links_every_page_of_docs() -> None:
    linked = {target for _, target, _ in targets(INDEX)}
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page not in linked | {INDEX}] == []


def test_an_anchor_that_is_not_there_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, with `code`\n\n```text\n# no heading\n```\n\n## Twice\n\n## Twice\n")
    assert anchors(page) == {"a-title-with-code", "twice", "twice-1"}
