"""Temporary directories where there is no place for them: an error of ours that names the place, and nothing left."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import pytest

from slime.types.errors import InvalidSetting, OutOfSpace
from slime.types.scratch import ScratchDirectory


def test_a_place_that_takes_no_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(InvalidSetting, match=f"cannot write {place}: "):
            ScratchDirectory("slime-test-", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(InvalidSetting, match=f"cannot write {tmp_path}/missing: ") as caught:
        ScratchDirectory("slime-test-")
    assert caught.value.field == "TMPDIR"


def test_a_disk_that_takes_no_bytes_is_told_and_nothing_stays(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OutOfSpace, match=str(tmp_path)):
            ScratchDirectory("slime-test-", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
