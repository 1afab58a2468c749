"""Files that go to disk while they are written."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.converters.files import flushing
from slime.converters.files.flushing import FLUSH_BYTES, Flusher
from slime.converters.files.hf_writer import HfFiles, HfTensor, create, divide_into_files, places
from slime.converters.torch_dist.keys import Place
from slime.converters.torch_dist.writer import ChunkFile
from slime.types.errors import InvalidSetting, OutOfSpace


@pytest.fixture
def descriptor(tmp_path: Path) -> int:
    return os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)


def refuse(number: int) -> Callable[[int], None]:
    def flush(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    return flush


def test_a_file_is_flushed_beside_its_writer_after_so_many_bytes(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, flushed = threading.Event(), threading.Event(), []

    def flush(which: int) -> None:
        begun.set()
        assert may_end.wait(60)
        flushed.append(which)

    monkeypatch.setattr(flushing.os, "fdatasync", flush)
    flusher = Flusher()
    flusher.wrote(descriptor, FLUSH_BYTES - 1)
    assert not begun.is_set()
    flusher.wrote(descriptor, 1)
    assert begun.wait(60)
    flusher.wrote(descriptor, FLUSH_BYTES)  # does not wait for the one that is going on, and adds none
    may_end.set()
    flusher.finish(descriptor)
    flusher.close()
    os.close(descriptor)
    assert flushed == [descriptor]


def test_what_the_thread_was_told_of_a_failed_write_is_raised_at_the_end(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing.os, "fdatasync", refuse(5))
    flusher = Flusher()
    for _ in range(3):
        flusher.wrote(descriptor, FLUSH_BYTES)
    with pytest.raises(OSError, match="Input/output error"):
        flusher.finish(descriptor)
    flusher.close()
    os.close(descriptor)


def write_hf(directory: Path, tensor: torch.Tensor) -> None:
    files = divide_into_files([HfTensor("weight", tensor.dtype, tuple(tensor.shape))])
    create(directory, files)
    with HfFiles(places(directory, files)) as out:
        out.write("weight", (slice(0, len(tensor)),), tensor)


def write_torch_dist(directory: Path, tensor: torch.Tensor) -> None:
    with ChunkFile(directory, 0) as file:
        file.add(Place("weight"), tuple(tensor.shape), tensor, (0,))


def fill_torch_dist(directory: Path, tensor: torch.Tensor) -> None:
    shape = tuple(tensor.shape)
    with ChunkFile(directory, 0) as file:
        file.fill(file.reserve(Place("weight"), shape, shape, tensor.dtype, (0,)), (slice(0, len(tensor)),), tensor)


@pytest.mark.parametrize("write", [write_hf, write_torch_dist, fill_torch_dist])
@pytest.mark.parametrize(("number", "kind"), [(28, OutOfSpace), (5, InvalidSetting)])
def test_a_checkpoint_whose_early_flush_failed_is_not_called_written(
    write: Any, number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushing, "FLUSH_BYTES", 8)
    monkeypatch.setattr(flushing.os, "fdatasync", refuse(number))
    with pytest.raises(kind):
        write(tmp_path, torch.arange(64))
