"""state.json: the state of a run, for viewers of its directory, while it runs and afterwards.

running   a process works on it; `phase` names the activity
done      it reached its end
stopped   Ctrl-C or a signal ended it
failed    an error ended it, see `error`, or its process is gone
unknown   there is no readable state.json
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from slime.types.errors import SlimeError
from slime.types.files import read_regular, write_whole

FILE = "state.json"
STATES = ("running", "done", "failed", "stopped", "unknown")
# Seconds between two writes of the phase.
INTERVAL = 1.0
# Seconds by which two readings of a process's start time may differ.
START_TOLERANCE = 2.0
GONE = "its process ended without an error message: it was killed, or the machine went down; see logs/"


@dataclass
class RunStatus:
    """The content of state.json. Times are seconds since 1970. num_steps: iterations of the run, once known."""

    state: str = "unknown"
    phase: str = ""
    error: str | None = None
    command: str = ""
    pid: int | None = None
    host: str = ""
    process_started: float | None = None
    started: float | None = None
    updated: float | None = None
    num_steps: int | None = None


class RunState:
    """Writes state.json of one run. A full disk does not end the run."""

    def __init__(self, directory: Path, command: str) -> None:
        """command: train or train-async."""
        now = time.time()
        self._path = directory / FILE
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self.state = RunStatus(
            state="running", phase="starting", command=command, pid=os.getpid(), host=socket.gethostname(),
            process_started=psutil.Process().create_time(), started=now, updated=now,
        )  # fmt: skip
        self._write()

    def phase(self, text: str, *, num_steps: int | None = None) -> None:
        """Records the current activity, beside the caller: at once, or later if the last one was written just now."""
        with self._lock:
            self.state.phase = text
            self.state.num_steps = self.state.num_steps if num_steps is None else num_steps
            wait = INTERVAL - (time.time() - (self.state.updated or 0.0))
            if num_steps is not None:
                self._write()
            elif self._timer is None:
                # A clock that was set back must not delay it.
                self._timer = threading.Timer(wait if 0 < wait <= INTERVAL else 0.0, self._write_late)
                self._timer.daemon = True
                self._timer.start()

    def end(self, state: str, error: str | None = None) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self.state.state, self.state.error = state, error
            self._write()

    def _write_late(self) -> None:
        with self._lock:
            self._timer = None
            if self.state.state == "running":
                self._write()

    def _write(self) -> None:
        self.state.updated = time.time()
        with contextlib.suppress(OSError, SlimeError):
            write_whole(self._path, json.dumps(asdict(self.state)) + "\n")


@contextmanager
def recorded(directory: Path, command: str) -> Iterator[RunState]:
    """Records that a run is running, and at the end of the block whether it is done, was stopped or has failed."""
    state = RunState(directory, command)
    try:
        yield state
    except KeyboardInterrupt:
        state.end("stopped")
        raise
    except BaseException as error:
        state.end("failed", f"{type(error).__name__}: {error}")
        raise
    state.end("done")


def read_state(directory: Path) -> RunStatus:
    """Returns the state of the run in `directory`; "failed" if its process on this host is gone."""
    try:
        found = json.loads(read_regular(directory / FILE))
        state = RunStatus(**{name: found[name] for name in RunStatus.__dataclass_fields__ if name in found})
    except (OSError, ValueError, TypeError, RecursionError):
        return RunStatus()
    if not _is_sound(state):
        return RunStatus()
    if state.state == "running" and state.host == socket.gethostname() and not _lives(state):
        return RunStatus(**asdict(state) | {"state": "failed", "error": f"{GONE} (last phase: {state.phase})"})
    return state


def _is_sound(state: RunStatus) -> bool:
    """Returns whether the fields have their types; another program may have written the file."""
    times = (state.process_started, state.started, state.updated)
    return (
        state.state in STATES
        and all(isinstance(text, str) for text in (state.phase, state.command, state.host))
        and (state.error is None or isinstance(state.error, str))
        and all(t is None or (type(t) in (int, float) and abs(t) < math.inf) for t in times)
        and all(number is None or type(number) is int for number in (state.pid, state.num_steps))
    )


def _lives(state: RunStatus) -> bool:
    try:
        process: Any = psutil.Process(state.pid)
        return process.status() != psutil.STATUS_ZOMBIE and (
            state.process_started is None or abs(process.create_time() - state.process_started) < START_TOLERANCE
        )
    except (psutil.NoSuchProcess, ValueError, TypeError, OverflowError):
        return False
    except psutil.AccessDenied:
        return True
