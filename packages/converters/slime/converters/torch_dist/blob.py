"""Locates the elements of a tensor in a file of torch.save: a zip whose records are stored as they are.

A .distcp file holds many such blobs one after the other. Once its place is known, a part of a tensor is read without
the rest of the tensor. Nothing but the description of that tensor is unpickled, with an allow-list.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.converters.files.rectangles import Shape, Stored
from slime.converters.torch_dist.unpickle import AllowList, loads_saved
from slime.types.errors import InvalidFile

# Fixed part of a zip's local file header.
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class _Part:
    """The bytes [offset, offset + length) of a file as a file of their own, for zipfile."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length, self._position = fd, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + position < 0:
            raise OSError("before the beginning")
        self._position = start + position
        return self._position

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._position)
        data = os.pread(self._fd, left if count < 0 else min(count, left), self._offset + self._position)
        self._position += len(data)
        return data


@dataclass
class _Tensor:
    dtype: torch.dtype
    record: str
    offset: int
    shape: Shape
    stride: Shape

    @property
    def is_dense(self) -> bool:
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def _rebuild_v2(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> _Tensor:
    dtype, record = storage
    return _Tensor(dtype, record, offset, tuple(size), tuple(stride))


def _rebuild_v3(
    storage: Any, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> _Tensor:
    return _Tensor(dtype, storage[1], offset, tuple(size), tuple(stride))


def _stored(saved: Any) -> tuple[torch.dtype, str]:
    kind, dtype, record = saved[0], saved[1], saved[2]
    if kind != "storage" or not isinstance(dtype, torch.dtype):
        raise ValueError(f"a record of kind {kind!r}")
    return dtype, str(record)


def find_tensor(fd: int, file: Path, offset: int, length: int, key: str) -> Stored:
    """Finds the tensor whose blob is at [offset, offset + length) of `file`, open as `fd`.

    Raises InvalidFile naming file and key where there is no dense tensor, or its end is cut off.
    """
    source = f"{file}: {key}"
    if os.fstat(fd).st_size < offset + length:
        raise _damaged(file, key, f"cut short: {os.fstat(fd).st_size} bytes, expected {offset + length} or more")
    part = _Part(fd, offset, length)
    try:
        with zipfile.ZipFile(part) as archive:  # type: ignore[arg-type]
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            pickled = archive.read(entries["data.pkl"])
    except (zipfile.BadZipFile, KeyError, OSError, NotImplementedError, EOFError) as error:
        raise _damaged(file, key, f"not what torch.save writes: {error}") from None
    extra = {
        "torch._utils._rebuild_tensor_v2": _rebuild_v2,
        "torch._utils._rebuild_tensor_v3": _rebuild_v3,
        "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
        "torch.storage.UntypedStorage": torch.uint8,
    }
    unpickler = AllowList(io.BytesIO(pickled), source, extra)
    unpickler.persistent_load = _stored  # type: ignore[method-assign]
    try:
        tensor = unpickler.load()
    except InvalidFile:
        raise
    # A damaged pickle raises whatever its bytes happen to spell.
    except Exception as error:
        raise _damaged(file, key, f"{type(error).__name__}: {error}") from error
    if not isinstance(tensor, _Tensor) or not tensor.is_dense:
        raise _damaged(file, key, "no dense tensor")
    entry = entries.get(f"data/{tensor.record}")
    if entry is None or entry.compress_type != zipfile.ZIP_STORED:
        raise _damaged(file, key, f"no record {tensor.record}")
    if entry.file_size < (tensor.offset + math.prod(tensor.shape)) * tensor.dtype.itemsize:
        raise _damaged(file, key, f"{entry.file_size} bytes do not hold {tensor.dtype} {list(tensor.shape)}")
    header = os.pread(fd, _LOCAL_HEADER.size, offset + entry.header_offset)
    _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    start = offset + entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    return Stored(file, start + tensor.offset * tensor.dtype.itemsize, tensor.dtype, tensor.shape)


def read_saved(path: Path) -> Any:
    """Reads plain data that torch.save wrote into a file of its own; tensors in it become StandIns.

    Raises InvalidFile.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.partition("/")[2] == "data.pkl")
            return loads_saved(archive.read(name), str(path))
    except (zipfile.BadZipFile, StopIteration, KeyError, EOFError, NotImplementedError) as error:
        raise InvalidFile(
            f"{path}: not what torch.save writes: {error}", field="path", value=str(path), expected="a torch file"
        ) from None


def _damaged(file: Path, key: str, what: str) -> InvalidFile:
    return InvalidFile(f"{file}: {key}: {what}", field="path", value=str(file), expected="a whole torch_dist file")
