"""A temporary directory that a later process removes if this one is killed."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from slime.types.directories import try_lock

SCRATCH_MARK = "slime-scratch"  # in a ScratchDirectory: the host of its process


class ScratchDirectory:
    """A temporary directory `path` that `close` removes. A later one with the same prefix removes the directories that
    dead processes of this host and user left. parent: the directory to create it in (default: the system's)."""

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        directory, self._prefix = Path(parent or tempfile.gettempdir()), prefix
        for other in directory.glob(f"{prefix}*"):
            with suppress(OSError):  # somebody else's, or gone
                _remove_scratch(other)
        self._outer = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
        self._handle = os.open(self._outer, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self.path = self._outer / "run"
        self.path.mkdir()
        if try_lock(self._handle):  # without locks nobody could tell that it is in use
            (self._outer / SCRATCH_MARK).write_text(socket.gethostname())

    def close(self, *, keep: bool = False) -> None:
        """Removes the directory; call this once. keep: leave it, and what is in it, for good: no later process removes
        it then."""
        if keep:
            (self._outer / SCRATCH_MARK).unlink(missing_ok=True)
        else:
            _empty_scratch(self._outer)
        os.close(self._handle)

    def of_other_hosts(self) -> dict[Path, str]:
        """Returns the directories with this prefix that processes of other hosts made, and the hosts.

        Nobody here can tell whether those are in use.
        """
        found = {}
        for other in self._outer.parent.glob(f"{self._prefix}*"):
            with suppress(OSError, UnicodeDecodeError):
                host = (other / SCRATCH_MARK).read_text()
                if host != socket.gethostname():
                    found[other] = host
        return found


def _remove_scratch(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        is_ours = os.fstat(handle).st_uid == os.geteuid()
        if is_ours and (path / SCRATCH_MARK).read_bytes() == socket.gethostname().encode() and try_lock(handle):
            _empty_scratch(path)
    finally:
        os.close(handle)


def _empty_scratch(path: Path) -> None:
    for each in (path / "run", path):  # the mark last
        shutil.rmtree(each, ignore_errors=True)
