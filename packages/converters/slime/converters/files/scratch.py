"""Memory that is used again for one tensor after another."""

from __future__ import annotations

import mmap

import torch


class Scratch:
    """Gives tensors out of one buffer, which grows to the largest of them.

    New memory costs the kernel a fault and a cleared page for every 4 KiB, about as much as reading a file into it.
    """

    def __init__(self) -> None:
        self._buffer: mmap.mmap | None = None

    def tensor(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor with a storage of exactly its size and undefined content, valid until the next call."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        size = count * dtype.itemsize
        if self._buffer is None or len(self._buffer) < size:
            # Frees the old memory before the new is allocated. A tensor that still uses it keeps it alive.
            self._buffer = None
            self._buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(self._buffer, dtype=dtype, count=count).view(shape)
