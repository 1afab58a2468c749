"""Payloads as files: one file for the groups of a call, written under a temporary name and renamed.

The payload of a call's only group is named like its file. Those of several groups are spans of one file, each named
`FILE@POSITION.OFFSET.SIZE`: its position in the call, and its place in the file in bytes.

A file is never written again: a group that is returned and completed later gets a new payload, and the old one is
deleted once the state names the new one. A file is deleted with the last of its payloads: until then, the bytes of
groups that were released earlier stay on the disk. With `fsync` files and their directories reach the disk before
`flush` returns; without it, a completed group survives the death of the process but not a power cut, after which `read`
raises DataLoss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

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
_SPAN = re.compile(rf"({_NAME.pattern})@(\d+)\.(\d+)\.(\d+)")


class _Span(NamedTuple):
    """The place of a payload in a file that it shares. position: of its group in the call that wrote the file."""

    file: str
    position: int
    offset: int
    size: int


class FilePayloads(Payloads):
    """Payloads below `directory`, in files `SHARD/GROUP-RANDOM`, where GROUP is the highest index of the groups in it.
    Those that are set aside go below `lost+found` beside it.

    create: create the directory; without it, a missing directory counts as empty.
    """

    def __init__(self, directory: Path, *, fsync: bool = False, create: bool = True) -> None:
        self.directory = directory
        self.name = str(directory)
        self._aside = directory.parent / "lost+found"
        self.lost_and_found = str(self._aside)
        self._owner = directory.parent / "payloads-of"
        self.fsync = fsync
        # Positions of the spans in use, by file, as bits: a set for each file would take much more memory.
        self._in_use: dict[str, int] = {}
        self._in_use_lock = threading.Lock()
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

    def track(self, names: Iterable[str]) -> None:
        in_use: dict[str, int] = {}
        for span in filter(None, map(_span, names)):
            in_use[span.file] = in_use.get(span.file, 0) | 1 << span.position
        with self._in_use_lock:
            self._in_use = in_use

    def write(self, groups: Sequence[tuple[int, Sequence[bytes | memoryview]]]) -> list[str]:
        if not groups:
            return []
        # The highest index, because its group was drawn last: an older database does not know it, see `find_strays`.
        file = payload_name(max(group_index for group_index, _ in groups))
        sizes = [sum(map(len, parts)) for _, parts in groups]
        what = f"group {groups[0][0]}" if len(groups) == 1 else counted(len(groups), "group")
        self._write_file(file, [part for _, parts in groups for part in parts], what, sum(sizes))
        if len(groups) == 1:
            return [file]
        with self._in_use_lock:
            self._in_use[file] = (1 << len(groups)) - 1
        offsets = accumulate(sizes, initial=0)
        return [f"{file}@{n}.{offset}.{size}" for n, (size, offset) in enumerate(zip(sizes, offsets, strict=False))]

    def _write_file(self, name: str, parts: Sequence[bytes | memoryview], what: str, size: int) -> None:
        """Writes a new file. what, size: what is in it and its bytes, for errors."""
        path = self._path(name)
        partial = path + ".part"
        try:
            try:
                descriptor = os.open(partial, NEW, 0o666)
            except FileNotFoundError:  # the first file of its directory
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
                raise self._out_of_space(what, size, error) from error
            raise

    def flush(self, names: Collection[str]) -> None:
        if not self.fsync or not names:
            return
        paths = [Path(self._path(file)) for file in set(map(file_of, names))]
        try:
            # At the same time, so that the disk writes them together. The state names none of them yet, so their order
            # and that of their directories does not matter.
            list(self._flushing.map(_fsync, (*paths, *{path.parent for path in paths}, self.directory)))
        except OSError as error:
            if error.errno in FULL:
                size = sum(path.stat().st_size for path in paths)
                raise self._out_of_space(counted(len(names), "group"), size, error) from error
            raise

    def _out_of_space(self, what: str, size: int, error: OSError) -> OutOfSpace:
        return OutOfSpace(
            f"{what}: no space for {size} bytes in {self.directory}: {error.strerror}",
            field="buffer_dir", value=str(self.directory), expected=f"{size} bytes free",
        )  # fmt: skip

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        path, span, places = self._path(file_of(name)), _span(name), ranges
        shown = f"payload {path}"
        if span is not None:
            # Bytes behind the span belong to another group.
            places = [(span.offset + offset, max(0, min(length, span.size - offset))) for offset, length in ranges]
            shown = f"payload of {span.size} bytes from {span.offset} on in {path}"
        try:
            # O_NONBLOCK: opening a pipe, which a copy may have left in the file's place, would never return.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise DataLoss(f"{shown} is not a regular file", field="payload", value=name)
                parts = _read_ranges(descriptor, places)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise DataLoss(f"{shown} is gone", field="payload", value=name) from None
        except OSError as error:
            raise DataLoss(f"{shown} cannot be read: {error.strerror}", field="payload", value=name) from error
        for (offset, length), part in zip(ranges, parts, strict=True):
            if len(part) != length:
                raise DataLoss(
                    f"{shown}: {len(part)} bytes at {offset}, expected {length}: cut short, by a power failure?",
                    field="payload",
                    value=name,
                    expected=f"{length} bytes",
                )
        return parts

    def size(self, name: str) -> int | None:
        try:
            size = os.stat(self._path(file_of(name))).st_size
        except OSError:
            return None
        span = _span(name)
        return size if span is None else min(span.size, max(0, size - span.offset))

    def delete(self, name: str) -> None:
        span = _span(name)
        if span is None or self._release(span):
            _remove(self._path(file_of(name)))

    def _release(self, span: _Span) -> bool:
        """Notes that a span is no longer in use; returns whether it was the last one of its file that was."""
        with self._in_use_lock:
            # A file that is not known may have spans in use. If it has none, the next start sets it aside.
            before = self._in_use.get(span.file, 0)
            after = before & ~(1 << span.position)
            if after:
                self._in_use[span.file] = after
            else:
                self._in_use.pop(span.file, None)
            return bool(before) and not after

    def set_aside(self, name: str) -> None:
        assert file_of(name) == name, "groups that are completed, as those in shared files are, are never set aside"
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
    """Returns a new name for a file or an object. group_index: the highest of the groups whose samples it holds."""
    return f"{group_index // GROUPS_PER_DIRECTORY:06d}/{group_index:010d}-{secrets.token_hex(4)}"


def file_of(name: str) -> str:
    """Returns the name of the file or object that holds a payload."""
    span = _span(name)
    return name if span is None else span.file


def _span(name: str) -> _Span | None:
    """Returns the place of a payload in a file that it shares; None if it has one of its own."""
    match = _SPAN.fullmatch(name)
    return match and _Span(match[1], int(match[3]), int(match[4]), int(match[5]))


def group_of(file: str) -> int | None:
    """Returns the highest index of the groups whose samples a file holds; None for a name that is not of its form."""
    match = _NAME.fullmatch(file)
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
