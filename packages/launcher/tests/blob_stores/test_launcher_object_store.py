"""Blobs through Ray's object store, and through NIXL where it is installed, between processes as a run has them."""

from __future__ import annotations

import importlib.util
import os
import pickle
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from slime.launcher.blob_stores.base import KeeperReader, KeptWriter
from slime.launcher.blob_stores.nixl import NixlReader, NixlWriter
from slime.launcher.blob_stores.object_store import ObjectStoreReader, ObjectStoreWriter
from slime.launcher.platform.ray_cluster import OBJECT_STORE_BYTES, ray_cluster
from slime.launcher.services.supervisor import Process, Supervisor
from slime.types.blobs import INLINE_BYTES
from slime.types.errors import DeadlineExceeded, NotFound, Unavailable, WrongState
from slime.types.rpc import RpcSettings

# Stands in for the buffer: its settings say what it puts, for whom, and what it releases.
SERVICE = """
    import os
    import numpy as np

    class Running:
        address = f"here:{os.getpid()}"
        def stop(self, grace_seconds):
            pass

    def blob(number, size):
        return np.random.default_rng(number).bytes(size)

    def serve(settings, rpc, blobs=None):
        for owner, size in settings:
            if size:
                blobs.put([blob(owner, size), blob(owner + 1, size)], owner)
            else:
                blobs.release(owner)
        return Running()
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("modules")
    (directory / "a_keeper.py").write_text(textwrap.dedent(SERVICE))
    # Ray workers import what the driver can.
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(directory), before) if part)
    sys.path.insert(0, str(directory))
    with ray_cluster(None, num_cpus=2):
        yield "a_keeper"
    sys.path.remove(str(directory))
    os.environ["PYTHONPATH"] = before


@pytest.fixture
def keeper(module: str, tmp_path: Path) -> Iterator[Callable[..., tuple[Process, int]]]:
    """Starts a process that puts and releases what it is told to; returns (the process, its process id)."""
    supervisor = Supervisor(tmp_path / "logs", start_seconds=300, stop_seconds=5)

    def start(*told: tuple[int, int], blobs: KeptWriter | None = None) -> tuple[Process, int]:
        process = supervisor.spawn("keeper", {"num_cpus": 0})
        options = {} if blobs is None else {"blobs": blobs}
        address = supervisor.start(process, module, told, RpcSettings(), **options)
        return process, int(address.partition(":")[2])

    yield start
    supervisor.stop()


NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
stores = pytest.mark.parametrize("store", ["object-store", pytest.param("nixl", marks=NIXL)])


def writer_of(store: str) -> KeptWriter:
    return NixlWriter(alone=True) if store == "nixl" else ObjectStoreWriter()


def reader_of(store: str, keeper: Any, seconds: float) -> KeeperReader:
    return NixlReader(keeper, seconds, alone=True) if store == "nixl" else ObjectStoreReader(keeper, seconds)


def digest(data: bytes) -> bytes:
    from hashlib import sha256

    return sha256(data).digest()


def blob(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


def used_bytes() -> int:
    """Returns what the object store of this node holds."""
    import ray
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return stats.store_stats.object_store_bytes_used + stats.store_stats.spilled_bytes_total


@stores
def test_a_reader_gets_what_another_process_put(keeper: Callable[..., Any], store: str) -> None:
    process, _ = keeper((1, 200_000), (2, 200_000), blobs=writer_of(store))
    reader = reader_of(store, process.actor, 60)
    wanted = [blob(number, 200_000) for number in (3, 1, 2, 1)]
    assert [bytes(array) for array in reader.read([digest(data) for data in wanted])] == wanted
    assert reader.read([]) == []


@stores
def test_what_was_released_is_gone_and_a_long_run_keeps_nothing(keeper: Callable[..., Any], store: str) -> None:
    size = 8 << 20
    told = [item for owner in range(0, 40, 2) for item in ((owner, size), (owner, 0))]
    assert sum(2 * size for _, given in told if given) > 3 * OBJECT_STORE_BYTES
    before = used_bytes()
    process, pid = keeper(*told, (100, 1000), blobs=writer_of(store))
    reader = reader_of(store, process.actor, 60)
    with pytest.raises(NotFound, match="it was released"):
        reader.read([digest(blob(0, size))])
    assert bytes(reader.read([digest(blob(100, 1000))])[0]) == blob(100, 1000)
    # A store that kept them all would have written two thirds of them to the disk, or the process would have them.
    assert used_bytes() - before < OBJECT_STORE_BYTES
    if store == "nixl":
        assert psutil.Process(pid).memory_info().rss < psutil.Process().memory_info().rss + 2 * OBJECT_STORE_BYTES


@stores
def test_a_keeper_that_died_hangs_or_keeps_no_blobs_is_an_error_by_name(keeper: Callable[..., Any], store: str) -> None:
    wanted = [digest(blob(1, 1000))]
    process, _ = keeper()
    with pytest.raises(WrongState, match="keeper keeps no blobs"):
        reader_of(store, process.actor, 60).read(wanted)

    process, pid = keeper((1, 1000), blobs=writer_of(store))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match="1 blob of the buffer did not arrive .* within 0.5 s"):
        reader_of(store, process.actor, 0.5).read(wanted)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="1 blob of the buffer is gone from"):
        reader_of(store, process.actor, 60).read(wanted)


@NIXL
def test_a_keeper_that_dies_under_the_transfer_is_an_error_by_name(keeper: Callable[..., Any]) -> None:
    import ray

    data = blob(1, 1000)
    process, pid = keeper((1, 1000), blobs=writer_of("nixl"))
    reader = reader_of("nixl", process.actor, 5)
    offer = ray.get(process.actor.find_blobs.remote([digest(data)]))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((Unavailable, DeadlineExceeded), match="1 blob of the buffer .* NIXL"):
        reader.fetch(offer, [digest(data)], time.monotonic() + 5)


def test_a_writer_takes_only_its_settings_to_another_process() -> None:
    for writer in (ObjectStoreWriter(7), NixlWriter(alone=True, inline_bytes=7)):
        assert type(writer)(**({"alone": True} if writer.name == "nixl" else {})).inline_bytes == INLINE_BYTES
        copy = pickle.loads(pickle.dumps(writer))
        assert type(copy) is type(writer) and copy.inline_bytes == 7 and copy.kept_bytes() == 0
