"""Processes that the benchmark of scale starts, measures and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
DEADLINE = 600.0


@dataclass
class MeasuredProcess:
    """A process of the benchmark; address: that of its service, empty for one without."""

    process: subprocess.Popen[str]
    address: str = ""

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all its threads since it was started."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    @property
    def resident_mib(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE / 2**20


@contextmanager
def started(name: str, argv: list[str], *, serves: bool = False) -> Iterator[MeasuredProcess]:
    """Starts a Python program in a session of its own, so that Ctrl-C reaches it through its end alone.

    serves: wait for the line "listening on ADDRESS".
    """
    process = subprocess.Popen(
        [sys.executable, *argv], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        child = MeasuredProcess(process)
        if serves:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if words[:2] != ["listening", "on"]:
                sys.exit(f"{name} did not start: {' '.join(words)}")
            child.address = words[2]
        yield child
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(ready: Callable[[], bool], child: MeasuredProcess, what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not ready():
        if child.process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"{what} did not start: exit code {child.process.poll()}")
        time.sleep(0.02)
