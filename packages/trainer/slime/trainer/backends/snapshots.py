"""Sets of weights in host memory that replace the model's for a while, such as those of the reference model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Chunks = list[torch.nn.Module]


class Snapshots:
    """Copies of the weights of `chunks` by name: this rank's part of parameters and persistent buffers."""

    def __init__(self, chunks: Chunks) -> None:
        """chunks: modules, which may be sharded as DTensors; then no parameter may be gathered while this is used."""
        self._chunks = chunks
        self._kept: dict[str, list[Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def drop(self, name: str) -> None:
        self._kept.pop(name, None)

    @torch.no_grad()
    def keep(self, name: str) -> None:
        """Saves the model's current weights under `name`, replacing earlier ones."""
        if name not in self._kept:
            self._kept[name] = [_host_like(tensor) for tensor in self._tensors()]
        for kept, tensor in zip(self._kept[name], self._tensors(), strict=True):
            kept.copy_(tensor, non_blocking=True)
        _synchronize()

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """Gives the model the weights of `name` inside the block, and its own again after it."""
        self.keep("_own")
        self._restore(name)
        try:
            yield
        finally:
            self._restore("_own")

    @torch.no_grad()
    def _restore(self, name: str) -> None:
        for kept, tensor in zip(self._kept[name], self._tensors(), strict=True):
            tensor.copy_(kept, non_blocking=True)
        _synchronize()

    def _tensors(self) -> Iterator[Tensor]:
        for chunk in self._chunks:
            persistent = chunk.state_dict(keep_vars=True)
            # Transformer Engine's extra state is made for this call: FP8's recipe, pickled, and no weight.
            named = ((n, tensor) for n, tensor in persistent.items() if not n.endswith("_extra_state"))
            yield from (local(tensor) for _, tensor in named if isinstance(tensor, Tensor))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
