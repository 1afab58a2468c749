"""Large tensors of a step through a blob store: the same samples, stored once, released when the step is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from buffer_samples import finish

from slime.buffer import detached
from slime.buffer.service import RunningBuffer, serve
from slime.buffer.settings import BufferSettings
from slime.types import Sample
from slime.types.blobs import BlobReader, BlobWriter
from slime.types.clients import BufferClient
from slime.types.errors import InvalidField, NotFound, OutOfSpace

SAMPLES = 4
LARGE = 100_000


class MemoryBlobs(BlobWriter, BlobReader):
    """A blob store whose writer and reader are in one process. full: it can hold no more blobs."""

    name = "memory"

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self.full = False

    def hold(self, blobs: Any) -> list[Any]:
        if self.full:
            raise OutOfSpace("no room", field="store")
        self.held += map(len, blobs)
        return list(blobs)

    def read(self, wanted: Any) -> list[Any]:
        return self.find(wanted)


@pytest.fixture
def blobs() -> MemoryBlobs:
    return MemoryBlobs()


@pytest.fixture
def start(blobs: MemoryBlobs, tmp_path: Path) -> Callable[[], RunningBuffer]:
    settings = BufferSettings(
        n_samples_per_prompt=SAMPLES, rollout_global_dataset=False, buffer_dir=str(tmp_path / "state")
    )
    return lambda: serve(settings, blobs=blobs)


@pytest.fixture
def service(start: Callable[[], RunningBuffer]) -> Iterator[RunningBuffer]:
    with start() as running:
        yield running


@pytest.fixture
def plain(service: RunningBuffer) -> Iterator[BufferClient]:
    with BufferClient(service.address) as client:
        client.open_run("run")
        yield client


@pytest.fixture
def reader(service: RunningBuffer, blobs: MemoryBlobs) -> Iterator[BufferClient]:
    with BufferClient(service.address, blobs=blobs) as client:
        yield client


def seal(client: BufferClient, step: int, seed: int | None = None) -> None:
    """A step of one group, whose samples have experts of LARGE bytes each, of their own for each seed."""
    random = np.random.default_rng(step if seed is None else seed)
    client.add_prompts([f"of step {step}"])
    (lease,) = client.lease_groups(1)
    samples = finish(lease.group.samples)
    for sample in samples:
        sample.rollout_routed_experts = random.integers(0, 99, (4, LARGE // 16, 4), np.uint8)
    client.complete_group(lease.token, samples)
    client.seal_step(step, 1)


def test_a_reader_that_knows_the_store_gets_the_same_samples(
    plain: BufferClient, reader: BufferClient, blobs: MemoryBlobs
) -> None:
    seal(plain, 0)
    order = [3, 0, 0, 2, 1]
    inline: list[Sample] = list(plain.read_step(0, order))
    assert blobs.held == [], "a reader that names no store gets inline tensors"
    assert list(reader.read_step(0, order)) == inline
    assert blobs.held == [LARGE] * SAMPLES
    assert inline[0].rollout_routed_experts.nbytes == LARGE


def test_a_step_is_put_once_for_all_its_readers(
    plain: BufferClient, reader: BufferClient, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "CHUNK_BYTES", LARGE)
    seal(plain, 0)
    expected = list(plain.read_step(0, range(SAMPLES)))
    together = threading.Barrier(4)

    def read(_: int) -> list[Sample]:
        together.wait(30)
        return list(reader.read_step(0, range(SAMPLES)))

    with ThreadPoolExecutor(4) as pool:
        assert all(samples == expected for samples in pool.map(read, range(4)))
    assert blobs.held == [LARGE] * SAMPLES


def test_nothing_of_a_step_is_left_when_it_is_acknowledged(
    plain: BufferClient, reader: BufferClient, blobs: MemoryBlobs
) -> None:
    for step in range(20):
        # Every other step has the tensors of the one before.
        seal(plain, step, seed=step // 2)
        list(reader.read_step(step, range(SAMPLES)))
        assert blobs.kept_bytes() == SAMPLES * LARGE
        plain.acknowledge_step(step)
        assert blobs.kept_bytes() == 0
    # Blobs of an old step that is read again last until the next step is over.
    list(reader.read_step(0, [1]))
    assert blobs.kept_bytes() == LARGE
    plain.commit_steps(19)
    assert blobs.kept_bytes() == 0


def test_a_read_that_a_step_outlives_puts_nothing_more(
    plain: BufferClient, service: RunningBuffer, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "CHUNK_BYTES", LARGE)
    seal(plain, 0)
    steps = service.buffer.detached
    assert steps is not None
    chunks = steps.read(0, range(SAMPLES))
    (small,) = next(chunks)
    plain.acknowledge_step(0)
    (whole,) = next(chunks)
    assert len(small) < 1000 and len(whole) > LARGE and blobs.kept_bytes() == 0


def test_a_blob_of_a_step_that_is_over_is_an_error_that_names_it(
    plain: BufferClient, reader: BufferClient, blobs: MemoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(plain, 0)

    def late(wanted: Any) -> list[Any]:
        plain.acknowledge_step(0)
        return blobs.find(wanted)

    monkeypatch.setattr(blobs, "read", late)
    with pytest.raises(NotFound, match="no blob [0-9a-f]{64} in the store memory"):
        list(reader.read_step(0, [0]))


def test_a_run_that_is_opened_again_replays_the_same_samples(
    start: Callable[[], RunningBuffer], blobs: MemoryBlobs
) -> None:
    with start() as service, BufferClient(service.address, blobs=blobs) as client:
        client.open_run("run")
        for step in range(2):
            seal(client, step)
        before = [list(client.read_step(step, range(SAMPLES))) for step in range(2)]
        assert blobs.kept_bytes() == 2 * SAMPLES * LARGE
        client.acknowledge_step(0)
        client.open_run("run", last_committed_step=-1)
        assert blobs.kept_bytes() == 0, "the stored blobs belong to a trainer that is gone"
        assert [list(client.read_step(step, range(SAMPLES))) for step in range(2)] == before
    with start() as service, BufferClient(service.address, blobs=blobs) as client:
        client.open_run("run", last_committed_step=0)
        assert list(client.read_step(1, range(SAMPLES))) == before[1]


def test_errors_are_those_of_a_read_without_a_store(
    plain: BufferClient, reader: BufferClient, blobs: MemoryBlobs
) -> None:
    with pytest.raises(NotFound, match="step 5 is not sealed"):
        list(reader.read_step(5, [0]))
    seal(plain, 0)
    with pytest.raises(InvalidField, match="positions: got 9"):
        list(reader.read_step(0, [9]))
    blobs.full = True
    with pytest.raises(OutOfSpace, match="no room"):
        list(reader.read_step(0, [0]))
    blobs.full = False
    assert list(reader.read_step(0, [0])) == list(plain.read_step(0, [0]))
