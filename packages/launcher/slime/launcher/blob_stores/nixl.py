"""NIXL as a blob store: readers copy from the memory of the buffer's process, by RDMA if the network supports it.

NIXL transfers through UCX, which selects the fastest transport that both processes have: shared memory, RDMA or TCP. A
blob is kept in memory once, in the process that put it, until it is released; nothing is written to disk. The package
`nixl` is imported where it is used, because it loads CUDA's libraries.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from slime.launcher.blob_stores.base import KeeperReader, KeptWriter, first_line
from slime.types.errors import OutOfSpace

NAME = "nixl"
KIND = "DRAM"
UNDER_WAY = "PROC"
POLL_SECONDS = 0.0005

# Agents are not thread-safe, and garbage collection may release memory in any thread.
_agent_lock = threading.RLock()
_abandoned: list[_Region] = []


@cache
def _agent(alone: bool, *, keeps: bool) -> Any:
    """Returns the NIXL agent of this process.

    alone: the run is on one node, and the agent listens on the loopback only.
    keeps: other processes read from this one, which over TCP needs a thread that polls for them; a reader polls itself.
    """
    if alone:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    nixl = importlib.import_module("nixl._api")
    return nixl.nixl_agent(
        f"slime-{uuid.uuid4().hex}", nixl.nixl_agent_config(enable_prog_thread=keeps, backends=["UCX"])
    )


class _Region:
    """Registers `data`, [n] uint8, with NIXL for as long as this object lives."""

    def __init__(self, agent: Any, data: np.ndarray) -> None:
        self.address = data.ctypes.data
        with _agent_lock:
            registered = agent.register_memory([(self.address, data.nbytes, 0, "")], KIND)
        # The arguments of the finalizer keep the memory alive while it is registered.
        self.end = weakref.finalize(self, _forget, agent, registered, data)


def _forget(agent: Any, registered: Any, data: np.ndarray) -> None:
    with _agent_lock:
        agent.deregister_memory(registered)


class NixlWriter(KeptWriter):
    """Keeps the blobs of one `put` in one region of memory. alone: see `_agent`."""

    name = NAME

    def __init__(self, *, alone: bool, inline_bytes: int | None = None) -> None:
        super().__init__(*([] if inline_bytes is None else [inline_bytes]))
        self.alone = alone

    def __reduce__(self) -> tuple[Any, ...]:
        return _writer, (self.alone, self.inline_bytes)

    def hold(self, blobs: Sequence[bytes]) -> list[Any]:
        """Returns (region, address, size in bytes) of each blob. Raises OutOfSpace."""
        sizes = [len(blob) for blob in blobs]
        try:
            data = np.empty(sum(sizes), np.uint8)
        except MemoryError as error:
            raise OutOfSpace(
                f"no memory for {sum(sizes)} bytes of samples",
                field="--rollout-data-transport", value="nixl", expected="more memory, or grpc",
            ) from error  # fmt: skip
        starts = np.cumsum([0, *sizes])
        for blob, start in zip(blobs, starts, strict=False):
            data[start : start + len(blob)] = np.frombuffer(blob, np.uint8)
        region = _Region(_agent(self.alone, keeps=True), data)
        return [(region, region.address + int(start), size) for start, size in zip(starts, sizes, strict=False)]

    def offer(self, wanted: Sequence[bytes]) -> tuple[bytes, list[tuple[int, int]]]:
        """Returns (metadata of the agent, [(address, size in bytes) of each blob])."""
        found = self.find(wanted)
        with _agent_lock:
            metadata = _agent(self.alone, keeps=True).get_agent_metadata() if found else b""
        return metadata, [(address, size) for _, address, size in found]


def _writer(alone: bool, inline_bytes: int) -> NixlWriter:
    return NixlWriter(alone=alone, inline_bytes=inline_bytes)


@dataclass
class NixlReader(KeeperReader):
    """Reads blobs from the memory of another process. alone: see `_agent`."""

    alone: bool = field(kw_only=True)
    name = NAME
    where = "NIXL"

    def fetch(self, offer: Any, wanted: Sequence[bytes], deadline: float) -> list[np.ndarray]:
        metadata, places = offer
        if not places:
            return []
        data = np.empty(sum(size for _, size in places), np.uint8)
        starts = np.cumsum([0, *(size for _, size in places)])
        agent = _agent(self.alone, keeps=False)
        region = _Region(agent, data)
        local = [(region.address + int(start), size, 0) for start, (_, size) in zip(starts, places, strict=False)]
        remote = [(address, size, 0) for address, size in places]
        with _agent_lock:
            state = _copied(agent, metadata, local, remote, deadline)
        if state == UNDER_WAY:
            # A peer may still write into this memory, so it is never freed.
            _abandoned.append(region)
            raise self.late(wanted)
        region.end()
        if state != "DONE":
            raise self.gone(wanted, state)
        return [data[start : start + size] for start, (_, size) in zip(starts, places, strict=False)]


def _copied(agent: Any, metadata: bytes, local: list[Any], remote: list[Any], deadline: float) -> str:
    """Transfers the blobs. Returns DONE, UNDER_WAY if the deadline passed, or the text of the error."""
    bindings = importlib.import_module("nixl._bindings")
    failures = tuple(getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
    try:
        keeper = agent.add_remote_agent(metadata)
        descriptors = (agent.get_xfer_descs(side, KIND) for side in (local, remote))
        transfer = agent.initialize_xfer("READ", *descriptors, keeper)
        state = agent.transfer(transfer)
        while state == UNDER_WAY and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            state = agent.check_xfer_state(transfer)
        if state != UNDER_WAY:
            agent.release_xfer_handle(transfer)
            agent.remove_remote_agent(keeper)
        return str(state)
    except failures as error:
        return first_line(error)
