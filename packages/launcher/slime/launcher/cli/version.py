"""Versions of the installed packages of this project."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("types", "buffer", "rollout", "converters", "trainer", "launcher")


def versions() -> dict[str, str]:
    """Returns the version of each package by its name; "not installed" for one that runs from its source tree."""
    return {f"slime-{name}": _version(f"slime-{name}") for name in PACKAGES}


def versions_text() -> str:
    found = versions()
    width = max(map(len, found)) + 2
    lines = [f"{name:<{width}}{number}" for name, number in found.items()]
    return "\n".join([*lines, f"{'Python':<{width}}{platform.python_version()}"]) + "\n"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
