"""Writes a torch_dist checkpoint tensor by tensor: one .distcp file per process, the metadata at the end.

    with ChunkFile(directory, 0) as file:           in every process
        file.add(place, parameter_shape, tensor, start)     or `reserve`, then `fill` piece by piece
    write_metadata(directory, chunks of all processes)

megatron-core's `dist_checkpointing.load` reads the result at any layout of ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from slime.converters.files import rectangles
from slime.converters.files.flushing import Flusher
from slime.converters.files.rectangles import Index, Shape, Stored
from slime.converters.files.safetensors_dir import disk_errors
from slime.converters.torch_dist.blob import find_tensor
from slime.converters.torch_dist.description import plain
from slime.converters.torch_dist.directory import COMMON, CONFIG, METADATA
from slime.converters.torch_dist.keys import Place, extra_states
from slime.types.errors import InvalidFile

_STATE_FILE = "__extra_state.distcp"


class _Whole(io.FileIO):
    """A file whose `write` always writes its whole argument, in parts: torch.save cannot handle short writes."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        position, offset = 0, self.tell()
        while position < len(view):
            end = position + rectangles.room(offset + position)
            position += os.write(self.fileno(), view[position:end])
        return len(view)


@dataclasses.dataclass(frozen=True)
class WrittenChunk:
    """A chunk as the metadata describes it; plain data, since it is sent between processes."""

    keys: tuple[str, ...]
    dtype: torch.dtype
    shape: Shape
    start: Shape
    size: Shape
    file: str
    offset: int
    length: int


class ChunkFile:
    """The .distcp file of one process. chunks: what was added so far. Raises OutOfSpace."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / f"__{rank}_0.distcp"
        self.chunks: list[WrittenChunk] = []
        with disk_errors(self.path):
            self._file = _Whole(self.path, "x+b")
        self._flusher = Flusher()
        self._unfilled = 0

    def add(
        self, place: Place, shape: Shape, tensor: torch.Tensor, start: Shape, aliases: Iterable[Place] = ()
    ) -> None:
        """Saves `tensor` as the part that begins at `start` of a parameter of `shape` at `place`.

        aliases: further places that refer to the same bytes.
        """
        # torch.save writes the whole storage of a view.
        dense = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        self._flusher.wrote(self._file.fileno(), self._save(place, shape, dense, start, aliases).length)

    def reserve(
        self, place: Place, shape: Shape, size: Shape, dtype: torch.dtype, start: Shape, aliases: Iterable[Place] = ()
    ) -> Stored:
        """Leaves room for a part of `size` elements, as `add` saves it, and returns where, for `fill`.

        All of it must be filled before the file is closed. The checksum is left out; torch.load does not look at it.
        """
        # Memory that is never touched costs nothing.
        with torch.serialization.skip_data():
            chunk = self._save(place, shape, torch.empty(size, dtype=dtype), start, aliases)
        stored = find_tensor(self._file.fileno(), self.path, chunk.offset, chunk.length, place.key)
        self._unfilled += torch.Size(size).numel()
        return dataclasses.replace(stored, shape=size)

    def fill(self, stored: Stored, index: Index, tensor: torch.Tensor) -> None:
        """Writes: `part[index] = tensor`, into a part for which room was left."""
        rectangles.write(self._file.fileno(), stored, index, tensor)
        self._unfilled -= tensor.numel()
        self._flusher.wrote(self._file.fileno(), tensor.nbytes)

    def _save(
        self, place: Place, shape: Shape, dense: torch.Tensor, start: Shape, aliases: Iterable[Place]
    ) -> WrittenChunk:
        keys = (place.key, *(alias.key for alias in aliases))
        if any((alias.lead, alias.lead_shape) != (place.lead, place.lead_shape) for alias in aliases):
            raise ValueError(f"{keys}: aliases with other leading dimensions")
        offset = self._file.tell()
        with disk_errors(self.path):
            torch.save(dense.view([1] * len(place.lead) + list(dense.shape)), self._file)
        chunk = WrittenChunk(
            keys,
            dense.dtype,
            (*place.lead_shape, *shape),
            (*place.lead, *start),
            (*(1 for _ in place.lead), *dense.shape),
            self.path.name,
            offset,
            self._file.tell() - offset,
        )
        self.chunks.append(chunk)
        return chunk

    def close(self) -> None:
        if not self._file.closed:
            try:
                if self._unfilled:
                    raise ValueError(f"{self.path}: {self._unfilled:,} reserved elements were not filled")
                with disk_errors(self.path):
                    self._flusher.finish(self._file.fileno())
            finally:
                self._abandon()

    def _abandon(self) -> None:
        self._flusher.close()
        self._file.close()

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._abandon()


def write_metadata(directory: Path, chunks: Iterable[WrittenChunk]) -> None:
    """Writes `.metadata` and `metadata.json`, which turn a directory of .distcp files into a checkpoint.

    Raises InvalidFile for parts that do not form one tensor, OutOfSpace.
    """
    # Takes seconds to import, and workers that only write tensors do not need it.
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    filled: dict[str, int] = {}
    for chunk in chunks:
        for key in chunk.keys:
            entry = tensors.get(key)
            if entry is None:
                entry = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(chunk.shape), [])
                tensors[key] = entry
            assert isinstance(entry, TensorStorageMetadata)
            index = MetadataIndex(key, chunk.start)
            if entry.size != chunk.shape or entry.properties.dtype != chunk.dtype or index in storage:
                raise InvalidFile(
                    f"{directory}: {key}: parts do not fit together: {chunk.dtype} {list(chunk.shape)} at "
                    f"{list(chunk.start)}, {entry.properties.dtype} {list(entry.size)}",
                    field=key,
                )
            entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.start), torch.Size(chunk.size)))
            storage[index] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
            filled[key] = filled.get(key, 0) + torch.Size(chunk.size).numel()
    for key, count in filled.items():
        entry = tensors[key]
        assert isinstance(entry, TensorStorageMetadata)
        if count != entry.size.numel():
            raise InvalidFile(
                f"{directory}: {key}: {count:,} of {entry.size.numel():,} elements were written", field=key
            )
    shapes = {key: tuple(entry.size) for key, entry in tensors.items() if isinstance(entry, TensorStorageMetadata)}
    states = list(extra_states(shapes))
    if states:
        length = _write_state(directory / _STATE_FILE)
        for key in states:
            tensors[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = _StorageInfo(_STATE_FILE, 0, length)
    metadata = Metadata(tensors, None, storage, StorageMeta(), CURRENT_DCP_VERSION)
    _write(directory / METADATA, pickle.dumps(metadata))
    config = dict(
        sharded_backend="torch_dist", sharded_backend_version=1, common_backend="torch", common_backend_version=1
    )
    _write(directory / CONFIG, json.dumps(config).encode())


def _write_state(path: Path) -> int:
    """Writes one file for all state objects, which have the same content."""
    buffer = io.BytesIO()
    # megatron-core keeps a list of objects under a key.
    torch.save([None], buffer)
    _write(path, buffer.getvalue())
    return len(buffer.getvalue())


def write_common(
    directory: Path, args: Mapping[str, Any], iteration: int, more: Mapping[str, Any] | None = None
) -> None:
    """Writes `common.pt` as Megatron-LM expects it: arguments, iteration, format version, and `more`."""
    buffer = io.BytesIO()
    state = {
        "args": argparse.Namespace(**plain(args)),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        **(more or {}),
    }
    torch.save(state, buffer)
    _write(directory / COMMON, buffer.getvalue())


def _write(path: Path, data: bytes) -> None:
    with disk_errors(path), path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
