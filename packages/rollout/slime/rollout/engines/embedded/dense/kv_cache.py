"""Keys and values of running sequences, each in a row of its own that is written in place.

Address space is reserved for whole rows, but memory is used only for what is written: a row with 20 tokens takes the
memory of 20 tokens, however long the other rows are. A cache that is small as a whole has huge pages, which are read
faster, and all of its memory.

R: rows, L: layers, K: key-value heads, C: capacity of a row in tokens, D: size of a head.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from slime.types.errors import EngineError

SMALLEST_ROWS, SMALLEST_TOKENS = 8, 64
# Bytes of a small cache, unless less memory is planned.
SMALL = 1 << 30
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
LINUX = sys.platform == "linux"
# Linux does not count such a mapping as committed memory; Python 3.11 has no name for the flag.
MAP_NORESERVE = 0x4000


class KvCache:
    """A cache that grows with `reserve`, which keeps the tokens in use."""

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape = layers, heads, head_dim
        self._dtype = dtype
        self.planned = SMALL
        """Bytes that all tokens together may take; set before `reserve`."""
        self._map, self._kv_RL2KCD = self._zeros(SMALLEST_ROWS, SMALLEST_TOKENS)
        self._layers = self._kv_RL2KCD.unbind(1)

    @property
    def room(self) -> tuple[int, int]:
        """Returns (rows, tokens of a row)."""
        return self._kv_RL2KCD.shape[0], self._kv_RL2KCD.shape[4]

    @property
    def token_bytes(self) -> int:
        layers, heads, head_dim = self._shape
        return layers * 2 * heads * head_dim * self._dtype.itemsize

    def layer(self, index: int) -> torch.Tensor:
        """Returns the keys and values of a layer [R, 2, K, C, D], a view to read and write."""
        return self._layers[index]

    def reserve(self, rows: int, tokens: int, used: Sequence[int]) -> None:
        """Makes room for `rows` rows of `tokens` tokens.

        used: the number of tokens that each of the first rows holds. Only these are copied, so that the rest takes no
        memory. Raises EngineError if the system refuses the address space.
        """
        old = self._kv_RL2KCD
        if rows <= old.shape[0] and tokens <= old.shape[4]:
            return
        rows = max(old.shape[0], 1 << (rows - 1).bit_length())
        tokens = max(old.shape[4], 1 << (tokens - 1).bit_length())
        self._map, self._kv_RL2KCD = self._zeros(rows, tokens)
        self._layers = self._kv_RL2KCD.unbind(1)
        for row, count in enumerate(used):
            self._kv_RL2KCD[row, :, :, :, :count] = old[row, :, :, :, :count]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` tokens of a row into another row."""
        self._kv_RL2KCD[target, :, :, :, :tokens] = self._kv_RL2KCD[source, :, :, :, :tokens]

    def release(self, row: int, used: int) -> None:
        """Fills a row, of which `used` tokens were written, with zeros again; returns its memory unless the cache is
        small."""
        size = self._kv_RL2KCD[0].numel() * self._dtype.itemsize
        if LINUX and size % mmap.PAGESIZE == 0 and not self._is_small(len(self._map)):
            self._map.madvise(mmap.MADV_DONTNEED, row * size, size)
        else:
            self._kv_RL2KCD[row, :, :, :, :used] = 0

    def _is_small(self, size: int) -> bool:
        return size <= min(SMALL, self.planned)

    def _zeros(self, rows: int, tokens: int) -> tuple[mmap.mmap, torch.Tensor]:
        # Zeros, because masked values are still multiplied by 0, and must not be NaN.
        layers, heads, head_dim = self._shape
        shape = rows, layers, 2, heads, tokens, head_dim
        size = math.prod(shape) * self._dtype.itemsize
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (MAP_NORESERVE if LINUX else 0)
        try:
            mapped = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise EngineError(
                f"keys and values of {rows} sequences of up to {tokens} tokens need {size / 2**30:.1f} GiB of address "
                f"space, which the system refuses ({error.strerror}): lower max_running_requests or the context length",
                field="max_running_requests", value=rows,
            ) from error  # fmt: skip
        if LINUX:
            # With huge pages the first token of each layer of a row takes up to 2 MB. Some kernels have none.
            with contextlib.suppress(OSError):
                mapped.madvise(mmap.MADV_HUGEPAGE if self._is_small(size) else mmap.MADV_NOHUGEPAGE)
        return mapped, torch.frombuffer(mapped, dtype=self._dtype).view(shape)


def tokens_in_memory(token_bytes: int, fraction: float, device: torch.device | None = None) -> int:
    """Returns how many tokens fill a fraction of the memory: the GPU's for a CUDA device, else that of the container or
    the machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if device is not None and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif MEMORY_LIMIT.is_file() and (limit := MEMORY_LIMIT.read_text().strip()).isdigit():
        memory = min(memory, int(limit))
    return max(1, int(memory * fraction) // token_bytes)
