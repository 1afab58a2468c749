"""A temporary directory that a later process removes if this one is killed."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from slime.types.directories import path_errors, try_lock

SCRATCH_MARK = "slime-scratch"  # in a ScratchDirectory: the host of its process


def remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


class ScratchDirectory:
    """A temporary directory `path` that `close` removes. A later one with the same prefix removes the directories that
    dead processes of this host and user left.

    parent: the directory to create it in (default: the system's). remove: called with a `path` to remove, whose parent
    then goes if it is empty, too (default: everything goes; a directory in which other programs write needs a function
    that leaves what they wrote). Raises InvalidSetting if no directory can be made there, OutOfSpace.
    """

    def __init__(self, prefix: str, parent: str | None = None, *, remove: Callable[[Path], None] = remove_tree) -> None:
        self._prefix, self._remove = prefix, remove
        with path_errors(Path(parent or os.environ.get("TMPDIR") or "/tmp"), "TMPDIR"):
            directory = Path(parent or tempfile.gettempdir())
            for other in directory.glob(f"{prefix}*"):
                with suppress(OSError):  # somebody else's, or gone
                    self._remove_left(other)
            self._outer = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
            self.path = self._outer / "run"
            try:
                self._fill()
            except BaseException:
                shutil.rmtree(self._outer, ignore_errors=True)
                raise

    def _fill(self) -> None:
        self._handle = os.open(self._outer, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self.path.mkdir()
            if try_lock(self._handle):  # without locks nobody could tell that it is in use
                (self._outer / SCRATCH_MARK).write_text(socket.gethostname())
        except BaseException:
            os.close(self._handle)
            raise

    def close(self) -> None:
        """Removes the directory; call this once."""
        self._remove_whole(self._outer)
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

    def _remove_left(self, outer: Path) -> None:
        handle = os.open(outer, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            is_ours = os.fstat(handle).st_uid == os.geteuid()
            if is_ours and (outer / SCRATCH_MARK).read_bytes() == socket.gethostname().encode() and try_lock(handle):
                self._remove_whole(outer)
        finally:
            os.close(handle)

    def _remove_whole(self, outer: Path) -> None:
        self._remove(outer / "run")
        # Without the mark no later process tries again to remove what stays.
        (outer / SCRATCH_MARK).unlink(missing_ok=True)
        with suppress(OSError):  # somebody else's file is in it
            outer.rmdir()
