"""The weights that engines were sent last, kept in host memory as the base of the next delta."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.trainer.weight_sync.base import Weights
from slime.types.weight_deltas.buckets import TensorDelta, VersionDelta, encode_tensor
from slime.types.weight_deltas.encoding import Bytes

# Threads that encode: numpy, zstd and the checksums work without the interpreter's lock.
THREADS = min(8, os.cpu_count() or 1)


class Snapshot:
    """The last weights that were sent, by name, on the CPU.

    version: that of the weights; None while there are none, or while they are a mixture of two versions.

    elements, changed: number of elements in the last delta's tensors, and how many of them had changed.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.elements = self.changed = 0
        self._held: dict[str, tuple[str, tuple[int, ...], Bytes]] = {}

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for _, _, data in self._held.values())

    def take(self, version: int, weights: Weights) -> bool:
        """Replaces the weights, reusing their memory; returns True if they were already the same weights of the same
        version."""
        same, self.version = version == self.version, None
        earlier, self._held = self._held, {}
        for name, tensor in weights:
            about, new = _about(tensor), _bytes(tensor)
            dtype, shape, data = earlier.pop(name, (*about, None))
            if data is None or (dtype, shape) != about:
                data, same = new.copy(), False
            else:
                same = same and np.array_equal(data, new)
                np.copyto(data, new)
            self._held[name] = (*about, data)
        self.version = version
        return same and not earlier

    def deltas(self, about: VersionDelta, weights: Weights) -> Iterator[TensorDelta]:
        """Takes the weights and yields the change of each tensor; sets `version` once all of them are taken."""
        assert self.version == about.base_version
        self.version, self.elements, self.changed = None, 0, 0
        with ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as threads:
            under_way: deque[Future[TensorDelta]] = deque()
            for name, tensor in weights:
                self.elements += tensor.numel()
                under_way.append(threads.submit(self._change, about, name, _bytes(tensor)))
                if len(under_way) > THREADS:
                    yield self._counted(under_way.popleft())
            while under_way:
                yield self._counted(under_way.popleft())
        self.version = about.version

    def _change(self, about: VersionDelta, name: str, new: Bytes) -> TensorDelta:
        dtype, shape, held = self._held[name]
        delta = encode_tensor(about, name, dtype, shape, held, new)
        if delta.change.changed:
            np.copyto(held, new)
        return delta

    def _counted(self, delta: Future[TensorDelta]) -> TensorDelta:
        self.changed += delta.result().change.changed
        return delta.result()

    def weights(self) -> Weights:
        """Yields the tensors, which are parts of the snapshot."""
        for name, (dtype, shape, data) in self._held.items():
            yield name, torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


def _about(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _bytes(tensor: Tensor) -> Any:
    content = tensor.reshape(-1).view(torch.uint8)
    if content.device.type == "cuda":
        # A GPU copies to pinned memory faster, and the allocator keeps it for the next tensor.
        content = torch.empty_like(content, device="cpu", pin_memory=True).copy_(content)
    return content.numpy()
