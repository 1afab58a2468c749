"""Payload files hold what was written, whatever part of it each call of the system takes."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.buffer.store import blobs
from slime.buffer.store.blobs import FilePayloads
from slime.types.errors import DataLoss, OutOfSpace

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
        name = payloads.write(7, parts)
        assert (Path(directory) / name).read_bytes() == b"".join(parts)
        assert payloads.size(name) == end
        assert payloads.read(name, ranges) == parts
        assert payloads.read(name, ranges[::-1]) == parts[::-1]
        with pytest.raises(DataLoss, match="cut short"):
            payloads.read(name, [(end, 1)])


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
        payloads.write(0, [b"abc", b"def"])
    assert payloads.names() == set() and not [path for path in tmp_path.rglob("*") if path.is_file()]
    payloads.delete("000000/0000000000-00000000")
