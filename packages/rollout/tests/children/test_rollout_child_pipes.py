"""Lines of child processes: whole, in pieces, never, and on descriptors of any number."""

from __future__ import annotations

import fcntl
import os
import resource
import time
from collections.abc import Iterator

import pytest

from slime.rollout.children.pipes import read_json_line

BEYOND_SELECT = 1024


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_a_line_is_read_to_its_end(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b'{"port":')
    os.write(pipe[1], b" 1}\n")
    assert read_json_line(pipe[0], time.monotonic() + 10) == {"port": 1}


def test_a_pipe_without_a_line_is_none_at_the_deadline(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b'{"port":')
    assert read_json_line(pipe[0], time.monotonic()) is None


def test_a_closed_pipe_has_nothing() -> None:
    read, write = os.pipe()
    os.close(write)
    try:
        assert read_json_line(read, time.monotonic() + 10) == {}
    finally:
        os.close(read)


def test_descriptors_of_any_number_are_read(pipe: tuple[int, int]) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= BEYOND_SELECT:
        pytest.skip(f"this machine opens no more than {BEYOND_SELECT} files a process")
    os.write(pipe[1], b'{"port": 1}\n')
    high = fcntl.fcntl(pipe[0], fcntl.F_DUPFD, BEYOND_SELECT)
    try:
        assert read_json_line(high, time.monotonic() + 10) == {"port": 1}
    finally:
        os.close(high)
