"""`slime init` where its directory cannot be written whole."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from slime.launcher import cli


@pytest.mark.parametrize("existed", [False, True])
def test_a_project_that_does_not_fit_leaves_nothing(
    existed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if existed:
        (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # its weights are larger
    try:
        assert cli.main(["init", str(tmp_path / "mine")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "larger than this process or file system allows" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert cli.main(["init", str(tmp_path / "mine")]) == 0
