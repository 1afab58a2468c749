"""Payload files hold what was written, whatever part of it each call of the system takes."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.buffer.store import blobs
from slime.buffer.store.blobs import FilePayloads
from slime.types.errors import DataLoss, InvalidFile, OutOfSpace

NUM_GPUS = 0


@settings(deadline=None)
@given(parts=st.lists(st.binary(max_size=12), max_size=9), most_parts=st.integers(1, 4), most_bytes=st.integers(1, 9))
def test_a_payload_is_whole_although_writes_and_reads_are_partial(
    parts: list[bytes], most_parts: int, most_bytes: int
) -> None:
    def short_write(descriptor: int, given: Sequence[bytes]) -> int:
        assert len(given) <= most_parts
        return os.write(descriptor, b"".join(given)[:most_bytes])

    def short_read(descriptor: int, length: int, offset: int) -> bytes:
        return pread(descriptor, min(length, most_bytes), offset)

    pread = os.pread
    ranges, end = [], 0
    for part in parts:
        ranges.append((end, len(part)))
        end += len(part)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        patch.setattr(blobs, "IOV_MAX", most_parts)
        patch.setattr(os, "writev", short_write)
        patch.setattr(os, "pread", short_read)
        payloads = FilePayloads(Path(directory))
        (name,) = payloads.write([(7, parts)])
        assert (Path(directory) / name).read_bytes() == b"".join(parts)
        assert payloads.size(name) == end
        assert payloads.read(name, ranges) == parts
        assert payloads.read(name, ranges[::-1]) == parts[::-1]
        with pytest.raises(DataLoss, match="cut short"):
            payloads.read(name, [(end, 1)])


def test_ranges_that_follow_each_other_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = FilePayloads(tmp_path)
    (name,) = payloads.write([(0, [b"first", b"second", b"third"])])
    reads: list[tuple[int, int]] = []
    pread = os.pread

    def record(descriptor: int, length: int, offset: int) -> bytes:
        reads.append((offset, length))
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", record)
    assert payloads.read(name, [(0, 5), (5, 6), (11, 5), (5, 6)]) == [b"first", b"second", b"third", b"second"]
    assert reads == [(0, 16), (5, 6)]
    assert payloads.read(name, []) == []


def test_files_are_flushed_at_the_same_time_and_one_that_fails_fails_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = FilePayloads(tmp_path, fsync=True)
    names = [name for index in range(3) for name in payloads.write([(index, [b"samples"])])]
    # Three files, their directory, and the one above it.
    together = threading.Barrier(5, timeout=60)
    monkeypatch.setattr(os, "fsync", lambda descriptor: together.wait())
    payloads.flush(names)

    def full(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(names[1]):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace, match="3 groups: no space for 21 bytes"):
        payloads.flush(names)


def test_a_disk_that_fills_up_in_the_middle_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(descriptor: int, given: Sequence[bytes]) -> int:
        calls.append(descriptor)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(descriptor, given[0])

    monkeypatch.setattr(os, "writev", full)
    payloads = FilePayloads(tmp_path)
    with pytest.raises(OutOfSpace, match="no space for 6 bytes"):
        payloads.write([(0, [b"abc", b"def"])])
    assert payloads.names() == set() and not [path for path in tmp_path.rglob("*") if path.is_file()]
    payloads.delete("000000/0000000000-00000000")


def test_a_process_that_keeps_payloads_locked_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "CLAIM_SECONDS", 0.1)
    payloads = FilePayloads(tmp_path / "payloads")
    other = os.open(payloads.directory, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    outcome: list[BaseException] = []

    def claim() -> None:
        try:
            payloads.claim("own")
        except InvalidFile as error:
            outcome.append(error)

    waiting = threading.Thread(target=claim, daemon=True)
    waiting.start()
    waiting.join(30)
    try:
        assert not waiting.is_alive()
        assert "payloads: another process has kept it locked for 0.1 s" in str(outcome[0])
        assert payloads.owner() is None
    finally:
        os.close(other)
    payloads.claim("own")
    assert payloads.owner() == "own"
