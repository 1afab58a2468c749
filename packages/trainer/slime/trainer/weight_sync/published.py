"""The versions that one trainer process publishes below --update-weight-disk-dir.

    --update-weight-disk-dir/
        slime-weights-XXXXXXXX/run/weight_v000007    until the engines have read it
        slime-weights-YYYYYYYY/weight_v000007        with --update-weight-disk-keep-files

Each trainer process makes a directory of its own. Runs may therefore share --update-weight-disk-dir: none publishes
under another's names, and each removes only its own versions.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slime.types.clients import Engine
from slime.types.directories import clear_leftovers, path_errors, remove_written
from slime.types.errors import SlimeError
from slime.types.scratch import ScratchDirectory

FIELD = "--update-weight-disk-dir"
# Called with the directory of a version, once its files are written, and the engines that read it next.
AfterWrite = Callable[[Path, Sequence[Engine]], None]
PREFIX = "slime-weights-"
SHOWN = 3

log = logging.getLogger(__name__)


class PublishedVersions:
    """Publishes each version as a directory. keep: leave a version in place after the engines have read it.

    Without `keep`, if this process is killed, the next one on this host removes the versions that it left. Files that
    others put there stay, and so do versions left by processes on other hosts; the log names them.
    """

    def __init__(self, directory: str, *, keep: bool) -> None:
        self._directory = Path(os.path.realpath(directory))
        self._keep = keep
        self._scratch: ScratchDirectory | None = None
        self._place: Path | None = None
        self._holds_others = False

    @contextmanager
    def version(self, version: int) -> Iterator[Path]:
        """Yields the directory to write; removes it at the end of the block, unless versions are kept."""
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
                    self._scratch = ScratchDirectory(PREFIX, str(self._directory), remove=_remove_versions)
                    self._place = self._scratch.path
                    self._place.parent.chmod(0o755)
                    _tell_of_others(self._scratch)
                # Engines may run as another user.
                self._place.chmod(0o755)
        return self._place

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
        self._scratch = self._place = None


def _remove_versions(run: Path) -> None:
    """Removes the versions in the directory of a process; the log names what others put there, which stays."""
    try:
        clear_leftovers(run)
        for version in run.glob("weight_v*"):
            remove_written(version, field=FIELD)
        with suppress(OSError):
            run.rmdir()
        foreign = sorted(
            str(path.relative_to(run)) for path in run.rglob("*") if path.is_symlink() or not path.is_dir()
        )
    except (OSError, SlimeError) as error:
        log.warning("%s: %s stays: %s", FIELD, run, error)
        return
    if foreign:
        more = f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
        log.warning(
            "%s: %s stays, as it holds what slime did not write: %s%s", FIELD, run, ", ".join(foreign[:SHOWN]), more
        )


def _tell_of_others(scratch: ScratchDirectory) -> None:
    others = sorted((str(path), host) for path, host in scratch.of_other_hosts().items())
    if others:
        named = ", ".join(f"{path} of host {host}" for path, host in others[:SHOWN])
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        log.warning("%s: remove weights that ended runs on other hosts have left: %s%s", FIELD, named, more)
