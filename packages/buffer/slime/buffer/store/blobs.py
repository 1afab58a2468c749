"""Payloads as files: one file per group, written under a temporary name and renamed.

A file is never written again: a group that is returned and completed later gets a new file, and the old one is deleted
once the state names the new one. With `fsync` files and their directories reach the disk before `flush` returns;
without it, a completed group survives the death of the process but not a power cut, after which `read` raises DataLoss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime.buffer.store.base import Payloads
from slime.types.directories import try_lock
from slime.types.errors import DataLoss, InvalidFile, OutOfSpace, counted
from slime.types.files import whole_file

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
GROUPS_PER_DIRECTORY = 4096
# Files that wait for the disk at the same time.
FLUSHED_TOGETHER = 16
# Another process that claims payloads needs a moment for it, and seldom does.
CLAIM_SECONDS, LOOK_SECONDS = 30.0, 0.05
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
# Most parts of one call of writev on Linux.
IOV_MAX = 1024
_NAME = re.compile(r"\d{6}/(\d{10,})-[0-9a-f]{8}")
_PARTIAL = re.compile(_NAME.pattern + r"\.part")


class FilePayloads(Payloads):
    """Payloads below `directory`, as `SHARD/GROUP-RANDOM`; those that are set aside go below `lost+found` beside it.

    create: create the directory; without it, a missing directory counts as empty.
    """

    def __init__(self, directory: Path, *, fsync: bool = False, create: bool = True) -> None:
        self.directory = directory
        self.name = str(directory)
        self._aside = directory.parent / "lost+found"
        self.lost_and_found = str(self._aside)
        self._owner = directory.parent / "payloads-of"
        self.fsync = fsync
        # Starts threads when they are needed.
        self._flushing = ThreadPoolExecutor(FLUSHED_TOGETHER, thread_name_prefix="fsync")
        try:
            if create:
                directory.mkdir(parents=True, exist_ok=True)
            elif os.path.lexists(directory):
                os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise InvalidFile(
                f"{directory}: {error.strerror}: expected the directory of a buffer's payloads",
                field="buffer_dir", value=str(directory), expected="a directory",
            ) from None  # fmt: skip

    def write(self, group_index: int, parts: Sequence[bytes | memoryview]) -> str:
        name = payload_name(group_index)
        path = self._path(name)
        partial = path + ".part"
        try:
            try:
                descriptor = os.open(partial, NEW, 0o666)
            except FileNotFoundError:  # the first group of its directory
                os.makedirs(os.path.dirname(path), exist_ok=True)
                descriptor = os.open(partial, NEW, 0o666)
            try:
                _write(descriptor, parts)
            finally:
                os.close(descriptor)
            os.rename(partial, path)
        except OSError as error:
            _remove(partial)
            _remove(path)
            if error.errno in FULL:
                raise self._out_of_space(f"group {group_index}", sum(map(len, parts)), error) from error
            raise
        return name

    def flush(self, names: Collection[str]) -> None:
        if not self.fsync or not names:
            return
        paths = [Path(self._path(name)) for name in names]
        try:
            # At the same time, so that the disk writes them together. The state names none of them yet, so their order
            # and that of their directories does not matter.
            list(self._flushing.map(_fsync, (*paths, *{path.parent for path in paths}, self.directory)))
        except OSError as error:
            if error.errno in FULL:
                size = sum(path.stat().st_size for path in paths)
                raise self._out_of_space(counted(len(paths), "group"), size, error) from error
            raise

    def _out_of_space(self, what: str, size: int, error: OSError) -> OutOfSpace:
        return OutOfSpace(
            f"{what}: no space for {size} bytes in {self.directory}: {error.strerror}",
            field="buffer_dir", value=str(self.directory), expected=f"{size} bytes free",
        )  # fmt: skip

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        path = self._path(name)
        try:
            # O_NONBLOCK: opening a pipe, which a copy may have left in the file's place, would never return.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise DataLoss(f"payload {path} is not a regular file", field="payload", value=name)
                parts = _read_ranges(descriptor, ranges)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise DataLoss(f"payload {path} is gone", field="payload", value=name) from None
        except OSError as error:
            raise DataLoss(f"payload {path} cannot be read: {error.strerror}", field="payload", value=name) from error
        for (offset, length), part in zip(ranges, parts, strict=True):
            if len(part) != length:
                raise DataLoss(
                    f"payload {path}: {len(part)} bytes at {offset}, expected {length}: cut short, by a power failure?",
                    field="payload",
                    value=name,
                    expected=f"{length} bytes",
                )
        return parts

    def size(self, name: str) -> int | None:
        try:
            return os.stat(self._path(name)).st_size
        except OSError:
            return None

    def delete(self, name: str) -> None:
        _remove(self._path(name))

    def set_aside(self, name: str) -> None:
        target = self._aside / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.directory / name, target)

    def names(self) -> set[str]:
        return {name for name in self._files() if not _PARTIAL.fullmatch(name)}

    def delete_unfinished(self) -> None:
        for name in self._files():
            if _PARTIAL.fullmatch(name):
                self.delete(name)

    def owner(self) -> str | None:
        try:
            return self._owner.read_text().strip()
        except FileNotFoundError:
            return None

    def claim(self, owner: str) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(descriptor)
            if self.owner() is None:
                with whole_file(self._owner, "w") as file:
                    file.write(f"{owner}\n")
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        """Waits until no other process claims these payloads. Raises InvalidFile if one does not end."""
        deadline = time.monotonic() + CLAIM_SECONDS
        while try_lock(descriptor) is False:
            if time.monotonic() > deadline:
                raise InvalidFile(
                    f"{self.name}: another process has kept it locked for {CLAIM_SECONDS:g} s; it may be stopped",
                    field="buffer_dir", value=self.name, expected="a directory that no process keeps locked",
                )  # fmt: skip
            time.sleep(LOOK_SECONDS)

    def _path(self, name: str) -> str:
        # Text: a Path takes longer to make than the file takes to open.
        return f"{self.name}/{name}"

    def _files(self) -> set[str]:
        paths = (path for path in self.directory.rglob("*") if path.is_symlink() or not path.is_dir())
        return {path.relative_to(self.directory).as_posix() for path in paths}


def payload_name(group_index: int) -> str:
    """Returns a new name for the samples of a group."""
    return f"{group_index // GROUPS_PER_DIRECTORY:06d}/{group_index:010d}-{secrets.token_hex(4)}"


def group_of(name: str) -> int | None:
    """Returns the index of the group whose samples a payload holds; None for a name that is not a payload's."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _fsync(path: Path) -> None:
    """Flushes a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """Writes the concatenation of `parts`, without a copy of it."""
    left: list[bytes | memoryview] = list(parts)
    while left:
        written = os.writev(descriptor, left[:IOV_MAX])
        done = 0
        while done < len(left) and written >= len(left[done]):
            written -= len(left[done])
            done += 1
        left = left[done:]
        # A full disk, or a large write, takes a part of what it was given.
        if written:
            left[0] = memoryview(left[0])[written:]


def _read_ranges(descriptor: int, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Reads each (offset, length); ranges that follow each other, as a group's samples do, at once."""
    parts: list[bytes] = []
    first = 0
    for number, (offset, length) in enumerate(ranges, start=1):
        if number < len(ranges) and ranges[number][0] == offset + length:
            continue
        begin = ranges[first][0]
        data = _read(descriptor, begin, offset + length - begin)
        parts += [data[start - begin : start - begin + size] for start, size in ranges[first:number]]
        first = number
    return parts


def _read(descriptor: int, offset: int, length: int) -> bytes:
    """Reads `length` bytes; fewer where the file ends."""
    part = os.pread(descriptor, length, offset)
    while len(part) < length and (more := os.pread(descriptor, length - len(part), offset + len(part))):
        part += more
    return part


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
