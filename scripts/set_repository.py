"""Gives the wheels their links before a release: python scripts/set_repository.py https://HOST/OWNER/NAME REF

Package indexes show the README of a package without the repository around it. The script writes the links of
packages/*/README.md as addresses in the repository at REF, a tag or a branch, and these pages into `project.urls`.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The target of a link in Markdown; fenced blocks match too, without a target, and are left alone.
LINK = re.compile(r"^```.*?^```$|\]\((?!https?://|mailto:|#)([^)\s]+)\)", re.M | re.S)


def absolute(text: str, folder: str, base: str) -> str:
    """Returns the Markdown `text` of a page in `folder` with absolute links. base: of the repository's files."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        path, mark, anchor = match[1].partition("#")
        return f"]({base}/{posixpath.normpath(posixpath.join(folder, path))}{mark}{anchor})"

    return LINK.sub(replaced, text)


def urls(package: str, repository: str, base: str) -> str:
    """Returns the table `project.urls` of a package's pyproject.toml."""
    pages = {
        "Homepage": repository,
        "Documentation": f"{base}/packages/{package}/README.md",
        "Changelog": f"{base}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    return "\n".join(["[project.urls]", *(f'{name} = "{url}"' for name, url in pages.items())]) + "\n"


def main(repository: str, ref: str, root: Path = ROOT) -> None:
    if not re.fullmatch(r"https://[\w.-]+/[\w./-]+", repository):
        sys.exit(f"set_repository: the repository must be https://HOST/OWNER/NAME, got {repository!r}")
    base = f"{repository}/blob/{ref}"
    for project in sorted(root.glob("packages/*/pyproject.toml")):
        package, text = project.parent.name, project.read_text(encoding="utf-8")
        if "[project.urls]" in text:
            sys.exit(f"set_repository: {project.relative_to(root)} has links already")
        project.write_text(f"{text.rstrip()}\n\n{urls(package, repository, base)}", encoding="utf-8")
        page = project.with_name("README.md")
        page.write_text(absolute(page.read_text(encoding="utf-8"), f"packages/{package}", base), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
