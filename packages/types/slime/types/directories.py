"""Directories that appear whole or not at all, and replace only what this project wrote.

    writing = WholeDirectory(Path("out/model"), field="--save-hf")
    try:
        ...                          # fill writing.partial, an unpredictable name beside the target
        writing.complete("slime-trainer")
    finally:
        writing.discard()

A complete directory holds MARK, written last, which names its writer and lists its files. Another directory may replace
it as long as it holds nothing but those files. Anything else at the path (a file, a device, a link, a directory with
somebody else's file) is refused by name; `check_replaceable` does so before any work.

A directory is locked while it is written. The next process that writes to the same path removes what a dead process of
this host and user left behind; if that process died between the two renames of a replacement, the old directory is put
back.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slime.types.errors import InvalidSetting, OutOfSpace, SlimeError

MARK = "slime-files.json"
# Files that identify directories of versions that wrote no mark.
OLDER_MARKS = ("trainer.json", "slime.json")
EXPECTED = "a new or empty directory, or one that slime wrote"
MAX_NAMES = 3  # foreign files that an error lists
_LEFTOVER = re.compile(r"\.(.+)\.(?:old|partial)-[0-9a-f]{8}-")  # names that `_leftover_prefix` makes
# OSErrors that no path causes.
_OTHER = (ConnectionError, TimeoutError, ChildProcessError, ProcessLookupError, InterruptedError)


class WholeDirectory:
    """A directory `partial` beside `path` that takes its place once it is complete.

    field: the flag or field that named `path`. need_bytes: free space that the disk must have. alone: refuse if another
    process of this host is writing `path`; otherwise the directory that is completed last stays.
    Raises InvalidSetting if `path` may not be replaced or written, OutOfSpace.
    """

    def __init__(self, path: Path, *, field: str = "path", need_bytes: int = 0, alone: bool = False) -> None:
        self.path = path.absolute()
        self._field = field
        self._handle = -1
        with path_errors(self.path, field):
            check_replaceable(self.path, field=field)
            self._made_parent = not self.path.parent.exists()
            if not self._made_parent and _clear_leftovers(self.path) and alone:
                raise InvalidSetting(
                    f"{_label(field)}another process is writing {self.path}", field=field, value=str(self.path)
                )
            _check_space(self.path, need_bytes, field)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.partial, self._handle = _locked_directory(self.path, "partial")

    def complete(self, writer: str, *, files: Iterable[str] = (), **about: Any) -> None:
        """Renames `partial` to `path`. Raises InvalidSetting or OutOfSpace; `path` is then unchanged.

        files: names written by other hosts, which a listing may not show yet. about: further content of the mark.
        """
        with path_errors(self.path, self._field):
            if not self._is_ours():
                raise OSError(errno.ESTALE, "another process has moved the directory away", str(self.partial))
            mode = usual_mode(self.partial)
            names = {f.relative_to(self.partial).as_posix() for f in self.partial.rglob("*") if not f.is_dir()}
            mark = self.partial / MARK
            mark.write_text(json.dumps({"writer": writer, **about, "files": sorted({*names, *files})}, indent=1) + "\n")
            for file in (*self.partial.rglob("*"), self.partial):
                sync(file)
            os.fchmod(self._handle, mode)
            self._take_place()
            sync(self.path.parent)
        self._release()

    def discard(self) -> None:
        """Removes an incomplete directory. Safe to call twice, and after `complete`."""
        if self._handle < 0:
            return
        if self._is_ours():
            shutil.rmtree(self.partial, ignore_errors=True)
        self._release()
        if self._made_parent:
            # Skipped if another process has replaced or removed it.
            with suppress(OSError):
                self.path.parent.rmdir()

    def _is_ours(self) -> bool:
        """Tells whether `partial` is still the directory that this object created."""
        return _same(self.partial, self._handle)

    def _release(self) -> None:
        os.close(self._handle)
        self._handle = -1

    def _take_place(self) -> None:
        try:
            os.rename(self.partial, self.path)  # succeeds only if nothing or an empty directory is there
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        with _moved_aside(self.path, self._field):
            os.rename(self.partial, self.path)


@contextmanager
def _moved_aside(path: Path, field: str) -> Iterator[None]:
    """Moves a directory that slime wrote aside; removes it if the block succeeds, else restores it."""
    check_replaceable(path, field=field)
    aside, handle = _locked_directory(path, "old")
    kept = aside / path.name
    try:
        os.rename(path, kept)
        try:
            # Checked again, now that no other process can exchange it.
            if reason := _not_ours(kept):
                raise _refused(path, reason, field)
            yield
        except BaseException:
            os.rename(kept, path)
            raise
        # If this process is killed, the next writer finds this name and finishes the removal.
        aside = aside.rename(aside.with_name(aside.name.replace(".old-", ".partial-", 1)))
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        with suppress(OSError):
            aside.rmdir()
        os.close(handle)


def remove_directory(path: Path, *, field: str = "path") -> None:
    """Removes a directory that slime wrote, as a whole. Raises InvalidSetting where it holds anything else."""
    with path_errors(path, field), _moved_aside(path, field):
        pass


def remove_written(path: Path, *, field: str = "path") -> str | None:
    """Removes the files that slime wrote in a directory, and the directory if nothing else is in it.

    Returns the reason why the directory stays; None where it is gone.
    """
    with path_errors(path, field):
        reason = _not_ours(path)
        if reason is None:
            remove_directory(path, field=field)
            return None
        mark = None if os.path.islink(path) or os.path.ismount(path) else read_mark(path)
        if mark is not None:
            files = {MARK, *map(str, mark["files"])}
            for directory, _, names in os.walk(path, topdown=False):
                here = Path(directory)
                for name in names:
                    if (here / name).relative_to(path).as_posix() in files:
                        (here / name).unlink()
                with suppress(OSError):  # something else is in it
                    here.rmdir()
        return reason


@contextmanager
def whole_directory(
    path: Path, writer: str, *, field: str = "path", need_bytes: int = 0, alone: bool = False, **about: Any
) -> Iterator[Path]:
    """Yields the path of a directory that replaces `path` if the block succeeds, and is removed if it fails."""
    directory = WholeDirectory(path, field=field, need_bytes=need_bytes, alone=alone)
    try:
        with path_errors(directory.path, field):
            yield directory.partial
        directory.complete(writer, **about)
    finally:
        directory.discard()


def check_replaceable(path: Path, *, field: str) -> None:
    """Raises InvalidSetting, naming `field`, if a WholeDirectory may not replace `path`."""
    with path_errors(path, field):
        if reason := _not_ours(path):
            raise _refused(path, reason, field)


def read_mark(path: Path) -> dict[str, Any] | None:
    """Returns the content of MARK in a directory; None if it has no valid one."""
    try:
        # A pipe would wait for its writer.
        mark = json.loads((path / MARK).read_text()) if (path / MARK).is_file() else None
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) and isinstance(mark.get("files"), list) else None


def foreign_files(path: Path) -> list[str]:
    """Returns a few names in a directory that its mark does not list; without a mark all are foreign."""
    mark = read_mark(path)
    files = {MARK, *map(str, mark["files"])} if mark else set()
    parents = {parent.as_posix() for file in files for parent in Path(file).parents}
    foreign: list[str] = []
    for directory, directories, names in os.walk(path, onerror=_raise):
        here = Path(directory).relative_to(path)
        for name in sorted(directories):
            below = here / name
            if below.as_posix() not in parents or (path / below).is_symlink():
                foreign.append(f"{below.as_posix()}/")
                directories.remove(name)
        foreign += [entry for name in sorted(names) if (entry := (here / name).as_posix()) not in files]
        if len(foreign) > MAX_NAMES:
            break
    return foreign


def _raise(error: OSError) -> None:
    raise error


def _not_ours(path: Path) -> str | None:
    """Returns the reason why a directory may not replace `path`; None if it may."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(mode):
        return f"is a {kind_of(mode)}"
    if os.path.ismount(path):
        return "is a mount point"
    foreign = foreign_files(path)
    if not foreign:
        return None
    if read_mark(path) is None and any((path / name).is_file() for name in OLDER_MARKS):
        return "was written by an older version of slime, which left no list of its files; move it away"
    more = ", ..." if len(foreign) > MAX_NAMES else ""
    return f"holds what slime did not write ({', '.join(foreign[:MAX_NAMES])}{more})"


def kind_of(mode: int) -> str:
    """Returns a word for what lies at a path with this `st_mode`."""
    kinds = {
        stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symbolic link", stat.S_IFSOCK: "socket",
        stat.S_IFIFO: "pipe",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "device")


def _refused(path: Path, reason: str, field: str) -> InvalidSetting:
    return InvalidSetting(
        f"{_label(field)}{path} {reason}; expected {EXPECTED}", field=field, value=str(path), expected=EXPECTED
    )


def _label(field: str) -> str:
    """Returns the beginning of a message: the flag, or nothing for the field of a request."""
    return f"{field}: " if field.startswith("--") else ""


def _leftover_prefix(path: Path, kind: str) -> str:
    host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    return f".{path.name}.{kind}-{host}-"


def _locked_directory(path: Path, kind: str) -> tuple[Path, int]:
    """Creates a directory beside `path` for this user alone; returns it and a descriptor that locks it."""
    while True:
        created = Path(tempfile.mkdtemp(prefix=_leftover_prefix(path, kind), dir=path.parent))
        handle = os.open(created, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if try_lock(handle) is not False and _same(created, handle):
            return created, handle
        # Another process mistook it for the leftover of a dead one.
        os.close(handle)


def usual_mode(directory: Path, *, of_file: bool = False) -> int:
    """Returns the permissions that a new directory in `directory` has, or a new file: the umask decides, say."""
    # A process cannot ask for its umask without changing it.
    probe = directory / f".{secrets.token_hex(8)}"
    probe.touch(exist_ok=False) if of_file else probe.mkdir()
    try:
        return stat.S_IMODE(probe.lstat().st_mode)
    finally:
        probe.unlink() if of_file else probe.rmdir()


def _same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except OSError:
        return False


def try_lock(handle: int) -> bool | None:
    """Tries to lock; returns whether it succeeded, None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def clear_leftovers(directory: Path) -> None:
    """Cleans up after dead writers of any entry of `directory`."""
    if directory.is_dir():
        names = [_LEFTOVER.match(entry.name) for entry in os.scandir(directory)]
        for name in {match[1] for match in names if match}:
            _clear_leftovers(directory / name)


def _clear_leftovers(path: Path) -> bool:
    """Cleans up after dead writers of `path`, restoring what they moved aside; returns whether one is alive."""
    alive = False
    for kind in ("old", "partial"):
        prefix = _leftover_prefix(path, kind)
        for name in [entry.name for entry in os.scandir(path.parent) if entry.name.startswith(prefix)]:
            leftover = path.parent / name
            try:
                handle = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                continue  # gone, or not a directory of ours
            try:
                locked = try_lock(handle) if os.fstat(handle).st_uid == os.geteuid() else None
                alive |= locked is False
                if locked and kind == "partial":
                    shutil.rmtree(leftover, ignore_errors=True)
                elif locked:
                    _put_back(leftover, path)
            finally:
                os.close(handle)
    return alive


def _put_back(aside: Path, path: Path) -> None:
    kept = aside / path.name
    if not os.path.lexists(path):
        with suppress(OSError):
            os.rename(kept, path)
    elif kept.is_dir() and not _not_ours(kept):
        shutil.rmtree(kept, ignore_errors=True)
    with suppress(OSError):
        aside.rmdir()


def _check_space(path: Path, needed: int, field: str) -> None:
    existing = next(parent for parent in path.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise OutOfSpace(
            f"{_label(field)}{path}: {needed} bytes are needed, {free} are free",
            field=field, value=str(path), expected=f"{needed} bytes",
        )  # fmt: skip


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def path_errors(path: Path, field: str = "path") -> Iterator[None]:
    """Turns a full disk into OutOfSpace, and a path that cannot be written into InvalidSetting."""
    try:
        yield
    except OSError as error:
        if isinstance(error, _OTHER):
            raise
        raise write_error(error, path, field) from error


def write_error(error: OSError, path: Path, field: str = "path") -> SlimeError:
    """Returns the error to raise if `path` cannot be written."""
    # numpy tells of a full disk in words alone: "8192 requested and 5824 written".
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or (error.errno is None and " requested and " in str(error)):
        return OutOfSpace(f"{_label(field)}no space left while writing {path}", field=field, value=str(path))
    if error.errno == errno.EFBIG:
        return OutOfSpace(
            f"{_label(field)}{path} becomes larger than this process or file system allows",
            field=field, value=str(path), expected="a higher limit (ulimit -f)",
        )  # fmt: skip
    about = f" ({error.filename})" if error.filename and os.fspath(error.filename) != os.fspath(path) else ""
    return InvalidSetting(
        f"{_label(field)}cannot write {path}: {error.strerror or error}{about}",
        field=field, value=str(path), expected="a place to write to",
    )  # fmt: skip
