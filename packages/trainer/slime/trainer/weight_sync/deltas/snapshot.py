"""The weights that engines were sent last, kept in host memory as the base of the next delta."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from slime.trainer.weight_sync.base import Weights
from slime.types.weight_deltas.buckets import TensorDelta, VersionDelta, encode_tensor
from slime.types.weight_deltas.encoding import Bytes, Run

Result = TypeVar("Result")

# Threads that encode: numpy, zstd and the checksums work without the interpreter's lock.
THREADS = min(16, os.cpu_count() or 1)
# Bytes of tensors that are copied from the GPU, encoded, or wait to be sent at once, if not one is larger. They are in
# pinned memory, of which torch keeps up to twice as much.
AHEAD_BYTES = 1 << 30
# Data type, shape and bytes of a tensor.
_Held = tuple[str, tuple[int, ...], Bytes]


class Snapshot:
    """The last weights that were sent, by name, on the CPU.

    version: that of the weights; None while there are none, or while they are a mixture of two versions.

    elements, changed: number of elements in the last delta's tensors, and how many of them had changed.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.elements = self.changed = 0
        self._held: dict[str, _Held] = {}

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for _, _, data in self._held.values())

    def take(self, version: int, weights: Weights) -> bool:
        """Replaces the weights, reusing their memory; returns True if they were already the same weights of the same
        version."""
        same, self.version = version == self.version, None
        earlier, self._held = self._held, {}
        with ThreadPoolExecutor(THREADS, thread_name_prefix="snapshot") as threads:
            copies = (
                (tensor.nbytes, threads.submit(_copy, name, earlier.pop(name, None), _about(tensor), _bytes(tensor)))
                for name, tensor in weights
            )
            for name, copy, equal in _in_order(copies):
                self._held[name], same = copy, same and equal
        self.version = version
        return same and not earlier

    def deltas(self, about: VersionDelta, weights: Weights) -> Generator[TensorDelta, None, None]:
        """Takes the weights and yields the change of each tensor; sets `version` once all of them are taken."""
        assert self.version == about.base_version
        self.version, self.elements, self.changed = None, 0, 0
        with (
            # Other threads than those of tensors, which wait for pieces; they end last.
            ThreadPoolExecutor(THREADS, thread_name_prefix="piece") as pieces,
            ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as threads,
        ):
            changes = (
                (tensor.nbytes, threads.submit(self._change, about, name, _bytes(tensor), pieces.map))
                for name, tensor in weights
            )
            for delta in _in_order(changes):
                self.elements += int(np.prod(delta.shape, dtype=np.int64))
                self.changed += delta.change.changed
                yield delta
        self.version = about.version

    def _change(self, about: VersionDelta, name: str, new: Bytes, run: Run) -> TensorDelta:
        dtype, shape, held = self._held[name]
        delta = encode_tensor(about, name, dtype, shape, held, new, run)
        if delta.change.changed:
            np.copyto(held, new)
        return delta

    def weights(self) -> Weights:
        """Yields the tensors, which are parts of the snapshot."""
        for name, (dtype, shape, data) in self._held.items():
            yield name, torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


def _copy(name: str, held: _Held | None, about: tuple[str, tuple[int, ...]], new: Bytes) -> tuple[str, _Held, bool]:
    """Returns the name, a copy of `new`, in the memory of `held` where it fits, and whether that had the same bytes."""
    if held is None or held[:2] != about:
        return name, (*about, new.copy()), False
    same = np.array_equal(held[2], new)
    np.copyto(held[2], new)
    return name, held, same


def _in_order(started: Iterable[tuple[int, Future[Result]]]) -> Iterator[Result]:
    """Yields the results in their order, with tensors of up to AHEAD_BYTES under way. started: bytes of a tensor, and
    what is done with it."""
    under_way: deque[tuple[int, Future[Result]]] = deque()
    ahead = 0
    for nbytes, future in started:
        under_way.append((nbytes, future))
        ahead += nbytes
        while ahead > AHEAD_BYTES:
            nbytes, future = under_way.popleft()
            ahead -= nbytes
            yield future.result()
    for _, future in under_way:
        yield future.result()


def _about(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _bytes(tensor: Tensor) -> Any:
    content = tensor.reshape(-1).view(torch.uint8)
    if content.device.type == "cuda":
        # A GPU copies to pinned memory faster, and the allocator keeps it for the next tensor.
        content = torch.empty_like(content, device="cpu", pin_memory=True).copy_(content)
    return content.numpy()
