"""Restart points: states of the trainer, kept during a run, from which its ranks can be started again.

`OUTPUT_DIR/recovery` holds one restart point, and a second one while that is written. They are written so seldom that
they take at most a twentieth of the time; the steps after the last one are trained again, from the buffer.
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

# The share of a run's time that restart points may take.
SHARE = 0.05


class RestartPoints:
    """The restart points of a run. first: the step before the run's first one, whose state is in `load` (None: the
    initial model). checkpoints: directory of the run's own checkpoints, which are restart points, too; None if they
    lack the optimizer. Checkpoints that exist already belong to another run or another course of this one, and do not
    count.

    interval_seconds: least time between two restart points. first_seconds: estimated time to write the first one.
    multiple_of: only the state after a multiple of so many iterations is complete.
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
        # A run that was killed has left its restart points.
        self.clear()

    def due(self, step: int) -> Path | None:
        """Returns the path for the state after `step`; None if the last one is recent enough."""
        if self._clock() - self._last < max(self._interval, self._cost / SHARE) or (step + 1) % self._multiple:
            return None
        return checkpoint_path(self._directory, step, self._backend)

    def written(self, path: Path, seconds: float) -> None:
        """Records that the state at `path` is complete, and deletes earlier states."""
        self._last, self._cost = self._clock(), seconds
        for _, other in named(self._directory):
            if other != path:
                _remove(other)

    def failed(self) -> None:
        """Records that a state could not be written; the next attempt comes after an interval."""
        self._last = self._clock()

    def newest(self, upto: int) -> tuple[int, str | None]:
        """Returns the step of the newest state up to step `upto`, and its directory."""
        candidates = {step: path for step, path in steps(self._directory).items() if step <= upto}
        if self._checkpoints is not None:
            for step, path in steps(self._checkpoints).items():
                whole = not (step + 1) % self._multiple
                if whole and self._start[0] < step <= upto and _identity(path) != self._others.get(path):
                    candidates[step] = path
        return (max(candidates), str(candidates[max(candidates)])) if candidates else self._start

    def clear(self) -> None:
        # A trainer that was killed leaves what it was writing.
        clear_leftovers(self._directory)
        for _, path in named(self._directory):
            _remove(path)
        (self._directory / TRACKER).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(self._directory)


def _identity(checkpoint: Path) -> tuple[int, int]:
    """Returns a value that differs between a checkpoint and the one that it replaced."""
    state = (checkpoint / STATE_FILE).stat()
    return state.st_ino, state.st_mtime_ns


def _remove(path: Path) -> None:
    try:
        remove_directory(path, field="--output-dir")
    except InvalidSetting as error:
        log.warning("not deleted: %s", error)
