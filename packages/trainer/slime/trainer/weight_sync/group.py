"""A process group of the trainer's rank 0 and the ranks of engines, apart from the trainer's own group.

SGLang makes its side of the group with torch's `rendezvous` and a group name; this side meets it under the same keys of
the store. Calls block in C++, possibly for ever when another member is gone: make them on a thread that can be
abandoned; `abort` ends them.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from slime.trainer.process.stores import listening_store
from slime.types.clients import Engine
from slime.types.errors import EngineError

# NCCL ends the whole process when its own deadline passes: the deadline of our caller has to come first.
MARGIN = datetime.timedelta(minutes=10)


class UpdateGroup:
    """Rank 0 of `size`. device: of the tensors; NCCL for a GPU, gloo for the CPU."""

    def __init__(self, name: str, address: str, size: int, device: torch.device, timeout_seconds: float) -> None:
        """address: of this host, as the engines can reach it. Listens; others can join from now on."""
        self.name = name
        self.address = address
        self.size = size
        self.device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._store = listening_store(address, 0, self._timeout)
        self.port = self._store.port
        self._members: dist.Backend | None = None

    def join(self) -> None:
        """Blocks until all have joined; with NCCL, that is part of the first broadcast."""
        store = dist.PrefixStore(self.name, self._store)
        store = dist.PrefixStore(
            f"{'cuda' if self.backend == 'nccl' else 'cpu'}/", dist.PrefixStore(f"{self.name}/", store)
        )
        if self.backend == "gloo":
            self._members = dist.ProcessGroupGloo(store, 0, self.size, timeout=self._timeout)
            return
        set_nccl_environment()
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout + MARGIN
        self._members = dist.ProcessGroupNCCL(store, 0, self.size, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Sends a tensor from this rank to all; blocks until it is done."""
        assert self._members is not None
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
        self._members.broadcast([tensor], dist.BroadcastOptions()).wait()
        if self.backend == "nccl":
            torch.cuda.current_stream(self.device).synchronize()

    def abort(self) -> None:
        """Leaves, without waiting for the others; whatever blocks in this group fails."""
        members, self._members = self._members, None
        if members is not None:
            # The call that failed has told what is wrong with this group.
            with contextlib.suppress(RuntimeError):
                members.abort()


def set_nccl_environment() -> None:
    """Sets the variables that SGLang's engines set for themselves: peers that allocate memory in different ways cannot
    talk to each other.

    NCCL reads them at its first use in a process.
    """
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def own_address(engines: Sequence[Engine]) -> str:
    """Returns the address of this host that the engines reach; the loopback if all of them are on this host."""
    for engine in engines:
        host = urlsplit(engine.url).hostname or "127.0.0.1"
        try:
            family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        except OSError as error:
            raise EngineError(f"engine {engine.name} at {engine.url}: {error}", field=engine.name) from error
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only chooses a route.
            probe.connect(target)
            address = str(probe.getsockname()[0])
        if not (address.startswith("127.") or address == "::1"):
            return address
    return "127.0.0.1"
