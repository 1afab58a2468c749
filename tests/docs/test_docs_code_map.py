"""Code maps are those of the docstrings, and no module is without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import code_map

NUM_GPUS = 0


@pytest.mark.parametrize(
    ("path", "text"), code_map.wanted().items(), ids=lambda value: value.parent.name if isinstance(value, Path) else ""
)
def test_a_map_is_up_to_date(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run: python scripts/code_map.py"


def test_every_module_says_what_it_is() -> None:
    without = [line for line in code_map.page().splitlines() if line.endswith(") |  |")]
    assert without == []


def test_every_compatibility_path_is_listed_as_one() -> None:
    """Modules outside of `slime.NAME` of their package, and those that the seeds name."""
    listed = set(re.findall(r"^\| `(slime\.[\w.]+)` \|", code_map.compatibility(), re.MULTILINE))
    outside = {
        code_map.dotted(path)
        for package in code_map.PACKAGES
        for path in (code_map.ROOT / "packages" / package / "slime").rglob("*.py")
        if path.relative_to(code_map.ROOT).parts[3] not in (package, "v1")
    }
    named = {
        line.split()[0]
        for line in (code_map.ROOT / "tests" / "seeds" / "seed_paths.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith("slime.")
    }
    assert len(named) > 20 and outside | named <= listed


def test_a_map_replaces_the_one_before_and_nothing_else() -> None:
    before = (
        "# slime-types\n\nText.\n\n## Code map\n\n"
        + code_map.START
        + "\nthe map before\n"
        + code_map.END
        + "\n\n## More\n"
    )
    after = code_map.readme("types", before)
    assert after.startswith("# slime-types\n\nText.\n\n## Code map\n") and after.endswith("## More\n")
    assert "the map before" not in after and "codec.py" in after
