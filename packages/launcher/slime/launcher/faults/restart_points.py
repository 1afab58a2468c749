"""Restart points: states of the trainer, kept during a run, from which its ranks are started again.

`OUTPUT_DIR/recovery` holds one of them, and a second one while that is written. They are written so seldom that they
take a twentieth of the time at most; the steps after the last one are trained again, from the buffer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from slime.launcher.run_directory.checkpoints import RECOVERY, STATE_FILE, TRACKER, checkpoint_path, named, steps
from slime.types.directories import clear_leftovers, remove_directory
from slime.types.errors import InvalidSetting

log = logging.getLogger(__name__)

# The part of a run's time that they may take.
SHARE = 0.05


class RestartPoints:
    """The restart points of a run. first: the step before the run's first one, whose state is in `load` (None: that of
    the model). checkpoints: directory of the run's own checkpoints, which are restart points, too; None where they lack
    the optimizer. Those that are there already are of another run, or of another course of this one.

    interval_seconds: least time between two. first_seconds: how long the first one may take to write.
    multiple_of: the number of iterations after which the state is whole.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        first: int,
        load: str | None,
        backend: str,
        checkpoints: Path | None,
        interval_seconds: float,
        first_seconds: float = 0.0,
        multiple_of: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = output_dir / RECOVERY
        self._start = first, load
        self._backend = backend
        self._checkpoints = checkpoints
        self._interval = interval_seconds
        self._multiple = multiple_of
        self._clock = clock
        self._last = clock()
        self._cost = first_seconds
        self._others = {} if checkpoints is None else {path: _identity(path) for path in steps(checkpoints).values()}
        # A run that was killed has left its own.
        self.clear()

    def due(self, step: int) -> Path | None:
        """Returns where to write the state after `step`; None where the last one is new enough."""
        if self._clock() - self._last < max(self._interval, self._cost / SHARE) or (step + 1) % self._multiple:
            return None
        return checkpoint_path(self._directory, step, self._backend)

    def written(self, path: Path, seconds: float) -> None:
        """Notes that the state at `path` is complete, and deletes those before it."""
        self._last, self._cost = self._clock(), seconds
        for _, other in named(self._directory):
            if other != path:
                _remove(other)

    def failed(self) -> None:
        """Notes that a state could not be written: the next one is tried after an interval."""
        self._last = self._clock()

    def newest(self, upto: int) -> tuple[int, str | None]:
        """Returns the last step of the newest state up to the step `upto`, and its directory."""
        found = {step: path for step, path in steps(self._directory).items() if step <= upto}
        if self._checkpoints is not None:
            for step, path in steps(self._checkpoints).items():
                whole = not (step + 1) % self._multiple
                if whole and self._start[0] < step <= upto and _identity(path) != self._others.get(path):
                    found[step] = path
        return (max(found), str(found[max(found)])) if found else self._start

    def clear(self) -> None:
        # A trainer that was killed leaves what it was writing.
        clear_leftovers(self._directory)
        for _, path in named(self._directory):
            _remove(path)
        (self._directory / TRACKER).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)


def _identity(checkpoint: Path) -> tuple[int, int]:
    """Returns what tells a checkpoint from the one whose place it took."""
    state = (checkpoint / STATE_FILE).stat()
    return state.st_ino, state.st_mtime_ns


def _remove(path: Path) -> None:
    try:
        remove_directory(path, field="--output-dir")
    except InvalidSetting as error:
        log.warning("not deleted: %s", error)
