"""Linters of this repository: ruff (check and format) at its current release, and the layering of the packages."""

from house import layering, ruff


def rules():
    return [*ruff.rules(), *layering.rules()]
