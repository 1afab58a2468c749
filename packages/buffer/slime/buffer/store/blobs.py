"""Payloads as files: one file a group, written beside its place and renamed into it.

A file is never written again: a group that is returned and completed later gets a new file, and the old one goes after
the state names the new one. With `fsync` the file and its directory reach the disk before `write` returns; without it,
a completed group survives the death of the process but not a power cut (then `read` says so).
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from slime.buffer.store.base import Payloads
from slime.types.errors import InvalidFile, NotFound, OutOfSpace

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
GROUPS_PER_DIRECTORY = 4096


class FilePayloads(Payloads):
    """Payloads below `directory`, as `SHARD/GROUP-RANDOM`."""

    def __init__(self, directory: Path, *, fsync: bool = False) -> None:
        self.directory = directory
        self.fsync = fsync
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, group_index: int, parts: Sequence[bytes]) -> str:
        name = f"{group_index // GROUPS_PER_DIRECTORY:06d}/{group_index:010d}-{secrets.token_hex(4)}"
        path = self.directory / name
        partial = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(partial, "wb") as file:
                file.writelines(parts)
                if self.fsync:
                    file.flush()
                    os.fsync(file.fileno())
            os.rename(partial, path)
            if self.fsync:
                _fsync_directory(path.parent)
                _fsync_directory(self.directory)
        except OSError as error:
            partial.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            if error.errno in FULL:
                size = sum(map(len, parts))
                raise OutOfSpace(
                    f"group {group_index}: no space for {size} bytes in {self.directory}: {error.strerror}",
                    field="buffer_dir",
                    value=str(self.directory),
                    expected=f"{size} bytes free",
                ) from error
            raise
        return name

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        path = self.directory / name
        found = []
        try:
            with open(path, "rb") as file:
                for offset, length in ranges:
                    file.seek(offset)
                    found.append(file.read(length))
        except FileNotFoundError:
            raise NotFound(f"payload {path} is gone", field="payload", value=name) from None
        for (offset, length), part in zip(ranges, found, strict=True):
            if len(part) != length:
                raise InvalidFile(
                    f"payload {path}: {len(part)} bytes at {offset}, expected {length}: cut short, by a power failure?",
                    field="payload",
                    value=name,
                    expected=f"{length} bytes",
                )
        return found

    def delete(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)

    def sweep(self, keep: set[str]) -> int:
        stray = [
            path
            for path in self.directory.glob("*/*")
            if path.is_file() and path.relative_to(self.directory).as_posix() not in keep
        ]
        for path in stray:
            path.unlink()
        return len(stray)


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
