"""Directories of weights below --update-weight-disk-dir: what is removed, what stays, and what is said of it."""

from __future__ import annotations

import logging
import subprocess
import sys
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


KILLED = """
import os, signal, sys
from slime.trainer.weight_sync.published import PublishedVersions
from slime.types.directories import whole_directory
versions = PublishedVersions(sys.argv[1], keep=False)
with versions.version(1) as first, versions.version(2) as second:
    with whole_directory(first, "test") as partial:
        (partial / "model.safetensors").write_text("weights")
    if "foreign" in sys.argv:
        (first / "cache").write_text("of an engine")
        (first.parent / "notes").write_text("of a user")
        (first.parent.parent / "beside").write_text("of a user")
    with whole_directory(second, "test") as partial:
        (partial / "model.safetensors").write_text("weights")
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("foreign", [False, True])
def test_what_a_killed_process_published_goes_and_files_of_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, foreign: bool
) -> None:
    subprocess.run([sys.executable, "-c", KILLED, tmp_path, *(["foreign"] if foreign else [])], timeout=60, check=False)
    (outer,) = tmp_path.iterdir()
    version = outer / "run" / "weight_v000001"
    assert (version / "model.safetensors").is_file()
    assert [path.name for path in outer.glob("run/.weight_v000002.partial-*/*")] == ["model.safetensors"]
    with caplog.at_level(logging.WARNING):
        publish(versions := PublishedVersions(str(tmp_path), keep=False), 1)
        versions.close()
        publish(later := PublishedVersions(str(tmp_path), keep=False), 1)
        later.close()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    if foreign:
        assert left == [f"{outer.name}/{name}" for name in ("beside", "run/notes", "run/weight_v000001/cache")]
        assert caplog.messages == [
            f"--update-weight-disk-dir: {outer / 'run'} stays, as it holds what slime did not write: "
            "notes, weight_v000001/cache"
        ]
    else:
        assert not list(tmp_path.iterdir()) and not caplog.messages


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
