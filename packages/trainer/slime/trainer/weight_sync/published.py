"""The versions that one trainer process publishes below --update-weight-disk-dir.

    --update-weight-disk-dir/
        slime-weights-XXXXXXXX/run/weight_v000007    until the engines have read it
        slime-weights-YYYYYYYY/weight_v000007        with --update-weight-disk-keep-files

A trainer process makes a directory that no other has. So runs may share the one above: none publishes under the names
of another, and each removes its own versions only.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.types.directories import path_errors, remove_written
from slime.types.scratch import ScratchDirectory

FIELD = "--update-weight-disk-dir"
PREFIX = "slime-weights-"
SHOWN = 3

log = logging.getLogger(__name__)


class PublishedVersions:
    """Directories of versions. keep: leave them when the engines have read them.

    Without it, the next process of this host removes what this one leaves if it is killed. Files of others in a version
    stay, and so does what processes of other hosts left; each is said once.
    """

    def __init__(self, directory: str, *, keep: bool) -> None:
        self._directory = Path(os.path.realpath(directory))
        self._keep = keep
        self._scratch: ScratchDirectory | None = None
        self._place: Path | None = None
        self._holds_others = False

    @contextmanager
    def version(self, version: int) -> Iterator[Path]:
        """Yields the directory to write, and has it removed at the end of the block."""
        path = self._open() / f"weight_v{version:06d}"
        try:
            yield path
        finally:
            if not self._keep and path.is_dir():
                self._remove(path)

    def _remove(self, path: Path) -> None:
        reason = remove_written(path, field=FIELD)
        if reason is not None and not self._holds_others:
            self._holds_others = True
            log.warning("%s: %s %s: only the weights were removed, there and in later versions", FIELD, path, reason)

    def _open(self) -> Path:
        if self._place is None:
            with path_errors(self._directory, FIELD):
                self._directory.mkdir(parents=True, exist_ok=True)
                if self._keep:
                    self._place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._directory))
                else:
                    self._scratch = ScratchDirectory(PREFIX, str(self._directory))
                    self._place = self._scratch.path
                    self._place.parent.chmod(0o755)
                    _tell_of_others(self._scratch)
                # Engines may run as another user.
                self._place.chmod(0o755)
        return self._place

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close(keep=self._holds_others)
        self._scratch = self._place = None


def _tell_of_others(scratch: ScratchDirectory) -> None:
    others = sorted((str(path), host) for path, host in scratch.of_other_hosts().items())
    if others:
        named = ", ".join(f"{path} of host {host}" for path, host in others[:SHOWN])
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        log.warning("%s: remove weights that ended runs on other hosts have left: %s%s", FIELD, named, more)
