"""Rectangles of tensors that lie in files row by row: read into memory and written from it, with nothing mapped.

In every file format here a tensor is a dense row-major array at some offset of a file. Data is read straight into its
target tensor, so a rectangle costs its own size and at most one `BUFFER_BYTES`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.types.directories import write_error
from slime.types.errors import InvalidFile, MissingFile

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Index = tuple[slice, ...]

BUFFER_BYTES = 16 << 20
# Most bytes of one write, which ends at a multiple of them in the file: from other places writes of 128 KiB took a
# seventh longer, and those of 64 KiB a third. Larger ones are slower where a virtual machine gets memory from its host
# at first touch, those of 64 MiB up to five times.
WRITE_BYTES = 128 << 10
# Most bytes of a tensor that are held while it is copied between files: those that a processor's cache still has when
# they are written.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Stored:
    """A dense row-major tensor in a file. offset: of its first element, in bytes."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: Shape


def whole(shape: Shape) -> Index:
    return tuple(slice(0, size) for size in shape)


def pieces(shape: Shape, dtype: torch.dtype) -> Iterator[Index]:
    """Yields runs of whole rows of at most `PIECE_BYTES`, or of one row; one piece for a scalar."""
    if not shape:
        yield ()
        return
    step = max(1, PIECE_BYTES // max(1, dtype.itemsize * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *whole(shape[1:]))


def open_file(path: Path) -> int:
    """Opens a file for reading; returns its descriptor. Raises MissingFile."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise MissingFile(f"no such file {path}", field="path", value=str(path)) from None


def read(fd: int, stored: Stored, index: Index, out: torch.Tensor) -> None:
    """Reads: `out[:] = stored[index]`, converted to the dtype of `out`, a tensor or view of the index's shape.

    index: a slice with start and stop for every dimension. Raises InvalidFile where the file ends too early.
    """
    if out.numel() == 0:
        return
    direct = out.dtype == stored.dtype and out.is_contiguous()
    shape, index = _merge(stored.shape, index)
    out = out.view([part.stop - part.start for part in index]) if direct else out
    if direct and len(index) == 1:
        _read_exactly(fd, stored, index[0].start, out)
        return
    _read_buffered(fd, stored, shape, index, out)


def _merge(shape: Shape, index: Index) -> tuple[Shape, Index]:
    """Merges dimensions of a rectangle as far as possible: whole trailing dimensions are one with that before them."""
    sizes, parts = list(shape), list(index)
    while len(sizes) > 1 and (parts[-1] == slice(0, sizes[-1]) or parts[-2].stop - parts[-2].start == 1):
        inner = sizes.pop()
        part = parts.pop()
        outer = parts[-1]
        sizes[-1] *= inner
        parts[-1] = slice(outer.start * inner + part.start, (outer.stop - 1) * inner + part.stop)
    while len(sizes) > 1 and parts[0].stop - parts[0].start == 1:
        outer, inner = parts.pop(0), sizes[1]
        sizes.pop(0)
        parts[0] = slice(outer.start * inner + parts[0].start, outer.start * inner + parts[0].stop)
    return tuple(sizes) or (1,), tuple(parts) or (slice(0, 1),)


def _read_buffered(fd: int, stored: Stored, shape: Shape, index: Index, out: torch.Tensor) -> None:
    """Reads whole rows of the first merged dimension, and copies the wanted columns."""
    import torch

    row = math.prod(shape[1:])
    flat = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
    target = flat.view([part.stop - part.start for part in index])
    step = max(1, BUFFER_BYTES // max(1, row * stored.dtype.itemsize))
    start, stop = index[0].start, index[0].stop
    for first in range(start, stop, step):
        last = min(first + step, stop)
        buffer = torch.empty((last - first) * row, dtype=stored.dtype)
        _read_exactly(fd, stored, first * row, buffer)
        block = buffer.view(last - first, *shape[1:])[(slice(None), *index[1:])]
        target[first - start : last - start].copy_(block)
    if flat is not out:
        out.copy_(flat)


def _read_exactly(fd: int, stored: Stored, element: int, out: torch.Tensor) -> None:
    view = as_bytes(out)
    position, offset = 0, stored.offset + element * stored.dtype.itemsize
    while position < len(view):
        count = os.preadv(fd, [view[position : position + (1 << 30)]], offset + position)
        if count == 0:
            raise InvalidFile(
                f"{stored.file}: cut short: {os.fstat(fd).st_size} bytes, expected {offset + len(view)} or more",
                field="path",
                value=str(stored.file),
            )
        position += count


def write(fd: int, stored: Stored, index: Index, tensor: torch.Tensor) -> None:
    """Writes: `stored[index] = tensor`, converted to the dtype of the file. Raises OutOfSpace, InvalidSetting."""
    if tensor.numel() == 0:
        return
    shape, index = _merge(stored.shape, index)
    rows = tensor.reshape([part.stop - part.start for part in index])
    for element, part in _runs(shape, index, rows):
        view = as_bytes(part.to(stored.dtype).contiguous())
        position, offset = 0, stored.offset + element * stored.dtype.itemsize
        while position < len(view):
            try:
                end = position + room(offset + position)
                position += os.pwrite(fd, view[position:end], offset + position)
            except OSError as error:
                raise write_error(error, stored.file) from None


def room(offset: int) -> int:
    """Returns the bytes of a write at an offset of a file, so that it ends at a multiple of `WRITE_BYTES`."""
    return WRITE_BYTES - offset % WRITE_BYTES


def _runs(shape: Shape, index: Index, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first element in the file, number of consecutive elements)."""
    if len(index) == 1:
        # Converted piece by piece, so that another dtype costs a buffer and no copy of the whole.
        step = max(1, BUFFER_BYTES // tensor.element_size())
        for first in range(0, tensor.numel(), step):
            yield index[0].start + first, tensor[first : first + step]
        return
    row = math.prod(shape[1:])
    for number in range(index[0].stop - index[0].start):
        for element, part in _runs(shape[1:], index[1:], tensor[number]):
            yield (index[0].start + number) * row + element, part


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor as bytes."""
    import torch

    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
