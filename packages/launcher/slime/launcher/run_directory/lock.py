"""Locks an output directory, because two runs would silently write over each other's files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime.types.directories import path_errors
from slime.types.errors import InvalidSetting


@contextmanager
def run_directory(directory: Path) -> Iterator[None]:
    """Creates `directory`, and removes it at the end if it is new and nothing was written into it."""
    is_new = not directory.exists()
    with path_errors(directory, "--output-dir"):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if is_new:
            with suppress(OSError):
                directory.rmdir()


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Locks the existing `directory` for the context, at most as long as this process lives.

    Raises InvalidSetting if another run holds the lock. Writes nothing; on a file system without locks, has no effect.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidSetting(
                f"--output-dir {directory}: another run writes there; give each run a directory of its own",
                field="--output-dir", value=str(directory), expected="a directory that no other run writes to",
            ) from None  # fmt: skip
        except OSError:
            # Some network file systems cannot lock directories.
            pass
        yield
    finally:
        os.close(descriptor)
