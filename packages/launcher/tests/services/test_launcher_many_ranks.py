"""Ranks of a trainer: where they meet, and that all are called before one answers."""

from __future__ import annotations

import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest

from slime.launcher.services.supervisor import ServiceDied, Supervisor

RANKS = 256


def test_all_ranks_are_called_at_once_beside_what_was_begun(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=1.0, stop_seconds=1.0)
    generating = threading.Event()
    begun = supervisor.begin(lambda: generating.wait(60.0))
    meeting = threading.Barrier(RANKS, timeout=20.0)

    def train(rank: int) -> int:
        meeting.wait()
        return rank

    assert supervisor.call_all([partial(train, rank) for rank in range(RANKS)]) == list(range(RANKS))
    generating.set()
    assert supervisor.join(begun)
    supervisor.authority.close()


def test_the_file_where_ranks_meet_is_new_after_a_restart_and_goes_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    supervisor = Supervisor(tmp_path / "logs", start_seconds=1.0, stop_seconds=1.0)
    first, second = supervisor.meeting_file(), supervisor.meeting_file()
    assert first != second
    (directory,) = tmp_path.glob("slime-ranks-*")
    assert second == f"file://{directory}/run/store"
    # Ranks that were killed cannot remove it themselves.
    supervisor.stop()
    assert not directory.exists()
    with pytest.raises(ServiceDied, match="being stopped"):
        supervisor.meeting_file()
