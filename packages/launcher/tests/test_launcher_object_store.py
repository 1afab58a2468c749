"""Blobs through Ray's object store, between processes as a run has them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.launcher.object_store import ObjectStoreReader, ObjectStoreWriter
from slime.launcher.placement import OBJECT_STORE_BYTES, ray_cluster
from slime.launcher.supervise import Process, Supervisor
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
    """Starts a process that has put and released what it was told; (the process, its process id)."""
    supervisor = Supervisor(tmp_path / "logs", start_seconds=60, stop_seconds=5)

    def start(*told: tuple[int, int], blobs: ObjectStoreWriter | None = None) -> tuple[Process, int]:
        process = supervisor.spawn("keeper", {"num_cpus": 0})
        options = {} if blobs is None else {"blobs": blobs}
        address = supervisor.start(process, module, told, RpcSettings(), **options)
        return process, int(address.partition(":")[2])

    yield start
    supervisor.stop()


def digest(data: bytes) -> bytes:
    from hashlib import sha256

    return sha256(data).digest()


def blob(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


def used_bytes() -> int:
    """What the object store of this node holds."""
    import ray
    from ray._private.internal_api import node_stats

    node = ray.nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return stats.store_stats.object_store_bytes_used + stats.store_stats.spilled_bytes_total


def test_a_reader_gets_what_another_process_put(keeper: Callable[..., Any]) -> None:
    process, _ = keeper((1, 200_000), (2, 200_000), blobs=ObjectStoreWriter())
    reader = ObjectStoreReader(process.actor, 60)
    wanted = [blob(number, 200_000) for number in (3, 1, 2, 1)]
    assert [bytes(array) for array in reader.read([digest(data) for data in wanted])] == wanted
    assert reader.read([]) == []


def test_what_was_released_is_gone_and_a_long_run_keeps_nothing(keeper: Callable[..., Any]) -> None:
    size = 8 << 20
    told = [item for owner in range(0, 40, 2) for item in ((owner, size), (owner, 0))]
    assert sum(2 * size for _, given in told if given) > 3 * OBJECT_STORE_BYTES
    before = used_bytes()
    process, _ = keeper(*told, (100, 1000), blobs=ObjectStoreWriter())
    reader = ObjectStoreReader(process.actor, 60)
    with pytest.raises(NotFound, match="it was released"):
        reader.read([digest(blob(0, size))])
    assert bytes(reader.read([digest(blob(100, 1000))])[0]) == blob(100, 1000)
    # A store that kept them all would have written two thirds of them to the disk.
    assert used_bytes() - before < OBJECT_STORE_BYTES


def test_a_keeper_that_died_hangs_or_keeps_no_blobs_is_an_error_by_name(keeper: Callable[..., Any]) -> None:
    wanted = [digest(blob(1, 1000))]
    process, _ = keeper()
    with pytest.raises(WrongState, match="keeper keeps no blobs"):
        ObjectStoreReader(process.actor, 60).read(wanted)

    process, pid = keeper((1, 1000), blobs=ObjectStoreWriter())
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded, match="1 blobs of the buffer did not come .* within 0.5 s"):
        ObjectStoreReader(process.actor, 0.5).read(wanted)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="1 blobs of the buffer are gone from Ray's object store"):
        ObjectStoreReader(process.actor, 60).read(wanted)


def test_a_writer_takes_only_its_settings_to_another_process() -> None:
    assert ObjectStoreWriter().inline_bytes == INLINE_BYTES
    copy = pickle.loads(pickle.dumps(ObjectStoreWriter(7)))
    assert copy.inline_bytes == 7 and copy.kept_bytes() == 0
