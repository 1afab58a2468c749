"""The last lines of a service's log, which the error about its death shows."""

from __future__ import annotations

import os
import subprocess
import sys
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


LOGS = r"""
import logging, sys
from pathlib import Path
from slime.launcher.services.actors import _redirect_output
_redirect_output(Path(sys.argv[1]))
try:
    raise ValueError("half of a pair: \ud83d")
except ValueError:
    logging.getLogger("slime").exception("a letter: \xe4")
print("printed \udcff")
"""


def test_text_that_no_encoding_has_can_be_logged(tmp_path: Path) -> None:
    """An error that cannot be logged would take the place of its cause, and its caller would wait for an answer."""
    log = tmp_path / "rollout.log"
    command = [sys.executable, "-c", LOGS, str(log)]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"})
    text = log.read_text(encoding="utf-8")
    assert r"ValueError: half of a pair: \ud83d" in text and "a letter: \xe4" in text and r"printed \udcff" in text
    assert "Logging error" not in text
