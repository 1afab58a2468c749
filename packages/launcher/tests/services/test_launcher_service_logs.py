"""The last lines of a service's log, which the error about its death shows."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from slime.launcher.services.supervisor import Supervisor

MEGABYTE = 1 << 20


def test_the_end_of_a_large_log_is_shown_without_reading_all_of_it(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=1, stop_seconds=1)
    log = tmp_path / "rollout.log"
    assert supervisor.last_lines("rollout") == ""
    log.write_bytes(b"a line of the engine\n" * MEGABYTE + b"\xff the\nlast\n")
    tracemalloc.start()
    shown = supervisor.last_lines("rollout", 2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert shown == f"\n    | last lines of {log}:\n    | \ufffd the\n    | last"
    assert peak < MEGABYTE
