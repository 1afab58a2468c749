"""Fixtures of the tests that install wheels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clean_environment import CleanEnvironment, collect_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return collect_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def make_environment(tmp_path: Path, wheels: Path) -> Callable[..., CleanEnvironment]:
    def make(python: str = "3.11") -> CleanEnvironment:
        return CleanEnvironment(tmp_path / f"venv-{Path(python).name}", wheels, python)

    return make
