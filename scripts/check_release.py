"""Checks before a release that tag, packages and changelog name one version: python scripts/check_release.py v0.2.0"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def faults(tag: str, root: Path = ROOT) -> list[str]:
    """Returns a sentence for each fault."""
    version = tag.removeprefix("v")
    found = []
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        if project["version"] != version:
            found.append(
                f"{path.relative_to(root)} has version {project['version']}: run scripts/set_version.py {version}"
            )
    headings = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    if not any(re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading) for heading in headings):
        found.append(f"CHANGELOG.md has no heading '## {version} - YYYY-MM-DD'")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if found := faults(sys.argv[1]):
        sys.exit("\n".join(found))
