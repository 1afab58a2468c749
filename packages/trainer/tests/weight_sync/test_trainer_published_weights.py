"""Directories of weights below --update-weight-disk-dir: what is removed, what stays, and what is said of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slime.trainer.weight_sync.published import PREFIX, PublishedVersions
from slime.types.directories import whole_directory
from slime.types.scratch import SCRATCH_MARK


def publish(versions: PublishedVersions, version: int, other: str | None = None) -> Path:
    with versions.version(version) as path:
        with whole_directory(path, "test") as partial:
            (partial / "model.safetensors").write_text("weights")
        if other is not None:
            (path / other).write_text("of an engine")
    return path


def test_a_file_of_others_ends_no_update_and_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    versions = PublishedVersions(str(tmp_path), keep=False)
    with caplog.at_level(logging.WARNING):
        first = publish(versions, 1, "cache")
        second = publish(versions, 2, "cache")
        clean = publish(versions, 3)
    assert [path.name for path in first.iterdir()] == ["cache"] == [path.name for path in second.iterdir()]
    assert not clean.exists()
    (said,) = caplog.messages
    assert said.startswith(
        f"--update-weight-disk-dir: {first} holds what slime did not write (cache): only the weights"
    )
    versions.close()
    PublishedVersions(str(tmp_path), keep=False).close()
    publish(later := PublishedVersions(str(tmp_path), keep=False), 1)
    later.close()
    assert (first / "cache").read_text() == "of an engine" == (second / "cache").read_text()


def test_nothing_stays_where_only_slime_wrote(tmp_path: Path) -> None:
    versions = PublishedVersions(str(tmp_path), keep=False)
    publish(versions, 1)
    versions.close()
    assert not list(tmp_path.iterdir())


def test_weights_that_another_host_left_are_named_once_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = tmp_path / f"{PREFIX}left"
    (left / "run" / "weight_v000001").mkdir(parents=True)
    (left / SCRATCH_MARK).write_text("node-7")
    versions = PublishedVersions(str(tmp_path), keep=False)
    with caplog.at_level(logging.WARNING):
        publish(versions, 1)
        publish(versions, 2)
    versions.close()
    assert caplog.messages == [
        f"--update-weight-disk-dir: remove weights that ended runs on other hosts have left: {left} of host node-7"
    ]
    assert (left / "run" / "weight_v000001").is_dir()
