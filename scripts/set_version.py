"""Sets the version of a release wherever it is written: python scripts/set_version.py 0.2.0"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("packages/*/pyproject.toml", "packages/all/BUILD", "pants-macros/packages.py")


def replaced(text: str, version: str) -> str:
    """Returns `text` with `version` as the version, as the exact sibling version, and as the range of siblings."""
    major, minor, _ = map(int, version.split("."))
    # Until 1.0 each minor version may change the contract.
    limit = f"0.{minor + 1}" if major == 0 else f"{major + 1}"
    text = re.sub(r'\bversion ?= ?"[^"]+"', lambda m: m[0].split('"')[0] + f'"{version}"', text)
    text = re.sub(r'("slime-[a-z]+(?:\[[a-z,-]+\])?)==[^"]+"', rf'\1=={version}"', text)
    return re.sub(r'("slime-[a-z]+(?:\[[a-z,-]+\])?)>=[^"]+"', rf'\1>={major}.{minor},<{limit}"', text)


def main(version: str, root: Path = ROOT) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        sys.exit(f"set_version: the version must be MAJOR.MINOR.PATCH, got {version!r}")
    for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        new = replaced(text, version)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(root))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
