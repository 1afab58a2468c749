"""Buckets of weights in memory that engines on this machine read without a copy on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slime.converters.files.hf_writer import HfTensor, file_header
from slime.types.addresses import split_url
from slime.types.clients import Engine
from slime.types.rpc.token_files import is_loopback


class BucketFile:
    """A safetensors file without a name, in memory that is used again for each bucket. It ends with this process.

    path: where processes of this user find it, on this machine.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("slime-weights")
        os.fchmod(self._descriptor, 0o600)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def write(self, bucket: Mapping[str, Tensor]) -> int:
        """Replaces the content by tensors on the CPU, of which those with wider elements come first; returns its
        bytes."""
        header = file_header([HfTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket.items()])
        parts = [memoryview(header), *(_bytes(tensor) for tensor in bucket.values())]
        size = sum(len(part) for part in parts)
        os.ftruncate(self._descriptor, size)
        place = 0
        for part in parts:
            while part:
                written = os.pwrite(self._descriptor, part, place)
                place, part = place + written, part[written:]
        return size

    def close(self) -> None:
        os.close(self._descriptor)


def may_read_files(engines: Sequence[Engine]) -> bool:
    """Tells whether all engines are called on this machine's loopback, where they may find files of this process."""
    hosts = [split_url(engine.url, "url")[0] for engine in engines]
    return hasattr(os, "memfd_create") and all(is_loopback(host) for host in hosts)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
