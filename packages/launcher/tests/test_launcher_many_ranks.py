"""Runs with more ranks than a machine has cores: all are called before one answers, for they meet in collectives."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from slime.launcher.services.supervisor import Supervisor

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
