"""The versions that one trainer process publishes below --update-weight-disk-dir.

    --update-weight-disk-dir/
        slime-weights-XXXXXXXX/run/weight_v000007    until the engines have read it
        slime-weights-YYYYYYYY/weight_v000007        with --update-weight-disk-keep-files

A trainer process makes a directory that no other has. So runs may share the one above: none publishes under the names
of another, and each removes its own versions only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.types.directories import ScratchDirectory, path_errors, remove_directory

FIELD = "--update-weight-disk-dir"
PREFIX = "slime-weights-"


class PublishedVersions:
    """Directories of versions. keep: leave them when the engines have read them.

    Without it, the next process removes what this one leaves if it is killed.
    """

    def __init__(self, directory: str, *, keep: bool) -> None:
        self._directory = Path(os.path.realpath(directory))
        self._keep = keep
        self._scratch: ScratchDirectory | None = None
        self._place: Path | None = None

    @contextmanager
    def version(self, version: int) -> Iterator[Path]:
        """Yields the directory to write, and has it removed at the end of the block."""
        path = self._open() / f"weight_v{version:06d}"
        try:
            yield path
        finally:
            if not self._keep and path.is_dir():
                remove_directory(path, field=FIELD)

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
                # Engines may run as another user.
                self._place.chmod(0o755)
        return self._place

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
        self._scratch = self._place = None
