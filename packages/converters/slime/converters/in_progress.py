"""Directories that appear whole or not at all, and the fingerprint by which one is known to be made of a source."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from slime.converters.safetensors_dir import disk_errors
from slime.types.errors import InvalidSetting, OutOfSpace

# Room for metadata, config and tokenizer beside the tensors.
SPARE_BYTES = 64 << 20


@contextmanager
def directory_in_progress(target: Path, *, flag: str) -> Iterator[Path]:
    """`.NAME.partial` beside `target`, empty; it becomes `target` at the end, replacing it, and is removed on an error.

    What a killed process left there is removed first. Raises InvalidSetting where another process is writing it.
    """
    partial = target.parent / f".{target.name}.partial"
    made = not target.parent.exists()
    with disk_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidSetting(
                f"{flag}: another process is writing {target}", field=flag, value=str(target)
            ) from None
        _empty(partial)
        try:
            yield partial
            _sync(partial)
            _replace(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            if made:
                # Not where someone else has put something there, or has removed it.
                with suppress(OSError):
                    target.parent.rmdir()
            raise
    finally:
        os.close(handle)


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with disk_errors(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def _replace(partial: Path, target: Path) -> None:
    old = target.parent / f".{target.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync_one(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def check_space(directory: Path, needed: int, *, flag: str) -> None:
    """Raises OutOfSpace unless `needed` bytes and some for small files are free below `directory`."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed + SPARE_BYTES:
        raise OutOfSpace(
            f"{flag}: {existing}: {free / 2**20:,.0f} MiB free, {(needed + SPARE_BYTES) / 2**20:,.0f} MiB needed",
            field=flag,
            value=str(directory),
            expected=f"{needed + SPARE_BYTES} bytes free",
        )


def fingerprint(files: list[Path], options: dict[str, Any]) -> str:
    """Differs when a file does, by size or time of change, or an option."""
    state = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
    return hashlib.sha256(json.dumps([state, options], sort_keys=True, default=str).encode()).hexdigest()
