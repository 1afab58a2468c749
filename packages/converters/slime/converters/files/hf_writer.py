"""Hugging Face weights written in any order, by any number of processes, without holding a shard in memory.

The headers of all files are known before the first tensor: they are written first, and tensors go to their places.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from slime.converters.files import rectangles
from slime.converters.files.dtypes import NAMES
from slime.converters.files.flushing import Flusher
from slime.converters.files.rectangles import Index, Shape, Stored
from slime.converters.files.safetensors_dir import INDEX, SHARD_BYTES, SINGLE, disk_errors
from slime.types.errors import InvalidSetting

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class HfTensor:
    name: str
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parse_size(text: str) -> int:
    """Reads a size: `5GB`, `500MiB` or a number of bytes. Raises InvalidSetting."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise InvalidSetting.must_be("--max-shard-size", "a size such as 5GB or 500MiB", got=text)
    return size


def divide_into_files(
    tensors: Iterable[HfTensor], *, like: Mapping[str, str] | None = None, max_bytes: int = SHARD_BYTES
) -> dict[str, list[HfTensor]]:
    """Returns the tensors of each file.

    like: the file of each tensor, followed where it names all of them; otherwise files of up to `max_bytes`, in order.
    """
    tensors = list(tensors)
    if like and all(tensor.name in like for tensor in tensors):
        files: dict[str, list[HfTensor]] = {}
        for tensor in tensors:
            files.setdefault(like[tensor.name], []).append(tensor)
        return dict(sorted(files.items()))
    groups: list[list[HfTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def places(directory: Path, files: Mapping[str, list[HfTensor]]) -> dict[str, Stored]:
    """Returns the place of each tensor once `create` has made the files."""
    place_of = {}
    for name, tensors in files.items():
        offset = len(file_header(tensors))
        for tensor in _in_order(tensors):
            place_of[tensor.name] = Stored(directory / name, offset, tensor.dtype, tensor.shape)
            offset += tensor.num_bytes
    return place_of


def create(directory: Path, files: Mapping[str, list[HfTensor]]) -> None:
    """Writes headers, room for the tensors, and the index of several files. Raises OutOfSpace."""
    for name, tensors in files.items():
        header = file_header(tensors)
        with disk_errors(directory / name), (directory / name).open("xb") as file:
            file.write(header)
            file.truncate(len(header) + sum(tensor.num_bytes for tensor in tensors))
    if list(files) == [SINGLE]:
        return
    weight_map = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with disk_errors(directory):
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _in_order(tensors: list[HfTensor]) -> list[HfTensor]:
    """Sorts tensors with wide types first, as safetensors wants them, so that all are aligned."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def file_header(tensors: list[HfTensor]) -> bytes:
    """Returns what a safetensors file begins with. Its tensors follow with wide types first, otherwise in order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in _in_order(tensors):
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class HfFiles:
    """The files of `create`, open for writing. Use as a context, at the end of which they are on disk."""

    def __init__(self, where: Mapping[str, Stored]) -> None:
        self._where = where
        self._descriptors: dict[Path, int] = {}
        self._flusher = Flusher()

    def write(self, name: str, index: Index, tensor: torch.Tensor) -> None:
        """Writes: `tensors[name][index] = tensor`, converted to its dtype. Raises OutOfSpace."""
        stored = self._where[name]
        if stored.file not in self._descriptors:
            self._descriptors[stored.file] = os.open(stored.file, os.O_WRONLY | os.O_CLOEXEC)
        descriptor = self._descriptors[stored.file]
        rectangles.write(descriptor, stored, index, tensor)
        self._flusher.wrote(descriptor, tensor.numel() * stored.dtype.itemsize)

    def __enter__(self) -> HfFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                for path, descriptor in self._descriptors.items():
                    with disk_errors(path):
                        self._flusher.finish(descriptor)
        finally:
            self._flusher.close()
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])
