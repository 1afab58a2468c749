"""The snapshot that deltas are made of, and requests that do not outlast their update."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.trainer.weight_sync.base import Weights
from slime.trainer.weight_sync.broadcasts import Broadcaster
from slime.trainer.weight_sync.deltas import snapshot
from slime.trainer.weight_sync.deltas.carriers import DiskCarrier, TensorCarrier
from slime.trainer.weight_sync.deltas.nccl_carrier import NcclCarrier
from slime.trainer.weight_sync.deltas.snapshot import Snapshot
from slime.trainer.weight_sync.deltas.transport import Buckets, DeltaCarrier, DeltaTransport
from slime.trainer.weight_sync.disk import DiskTransport
from slime.trainer.weight_sync.tensor import TensorTransport
from slime.types.clients import Engine
from slime.types.errors import EngineError, NotAvailable
from slime.types.weight_deltas.buckets import VersionDelta, read_bucket


def weights(value: float, size: int = 4) -> Weights:
    yield "a", torch.full((size,), value)
    yield "b", torch.full((2, 3), value, dtype=torch.bfloat16)


def test_a_snapshot_is_taken_in_the_memory_that_it_has() -> None:
    held = Snapshot()
    assert not held.take(1, weights(1.0))
    before = {name: tensor.data_ptr() for name, tensor in held.weights()}
    assert held.take(1, weights(1.0)), "nothing is other than it was"
    assert not held.take(1, weights(2.0)) and not held.take(2, weights(2.0))
    assert {name: tensor.data_ptr() for name, tensor in held.weights()} == before
    assert all(
        torch.equal(tensor, wanted) for (_, tensor), (_, wanted) in zip(held.weights(), weights(2.0), strict=True)
    )
    assert not held.take(2, weights(2.0, size=5)) and held.nbytes == 5 * 4 + 6 * 2
    assert not held.take(2, iter(list(weights(2.0, size=5))[:1])) and held.nbytes == 5 * 4


def many(value: float, fails_at: int = 100) -> Weights:
    for number in range(12):
        if number == fails_at:
            raise RuntimeError("the GPU is lost")
        yield f"t{number}", torch.full((number + 1, 3), value)


@pytest.mark.parametrize("ahead", [1, 20, 10**9])
def test_deltas_come_in_order_however_few_tensors_are_under_way(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    monkeypatch.setattr(snapshot, "AHEAD_BYTES", ahead)
    held = Snapshot()
    held.take(1, many(1.0))
    names = [delta.name for delta in held.deltas(VersionDelta(2, 1, "a", "xor", "xxh3-128"), many(2.0))]
    assert names == [name for name, _ in many(2.0)] and held.version == 2
    assert held.elements == held.changed == sum(tensor.numel() for _, tensor in many(2.0))
    for (_, tensor), (_, wanted) in zip(held.weights(), many(2.0), strict=True):
        assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("of_all", [True, False])
def test_a_snapshot_that_was_not_finished_has_no_version(of_all: bool) -> None:
    held = Snapshot()
    held.take(1, many(1.0))
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        if of_all:
            held.take(2, many(2.0, fails_at=7))
        else:
            list(held.deltas(VersionDelta(2, 1, "a", "xor", "xxh3-128"), many(2.0, fails_at=7)))
    assert held.version is None
    assert not held.take(2, many(2.0)) and held.version == 2
    for (_, tensor), (_, wanted) in zip(held.weights(), many(2.0), strict=True):
        assert torch.equal(tensor, wanted)


class Recorder(DeltaCarrier):
    """Keeps the numbers of tensors in the buckets that it is given. fails: at the second bucket."""

    name, tensor_bytes = "nccl", 100

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.sizes = fails, list[int]()

    def check(self, engines: Sequence[Engine]) -> None: ...

    def send_delta(
        self, engines: Sequence[Engine], about: VersionDelta, buckets: Buckets
    ) -> tuple[int, dict[str, Any]]:
        for bucket, _ in buckets:
            self.sizes.append(len(read_bucket(bucket)[1]))
            if self.fails and len(self.sizes) == 2:
                raise EngineError("the engine is gone")
        return 1, {}

    def send_whole(self, engines: Sequence[Engine], version: int, lineage: str, weights: Weights) -> int:
        return 1

    def close(self) -> None: ...


def holder(version: int) -> list[Engine]:
    return [Engine("a", "http://a", "sglang", True, version)]


def test_the_carrier_says_how_many_tensors_a_bucket_has() -> None:
    carrier = Recorder()
    updates = DeltaTransport(carrier, "xor", "xxh3-128", 10**6)
    updates.send(holder(0), 1, many(1.0))
    updates.send(holder(1), 2, many(2.0))
    # The tensors have 12, 24, ... 144 bytes.
    assert carrier.sizes == [3, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert NcclCarrier(Broadcaster(torch.device("cpu"), 1.0), 7).tensor_bytes == 7


def test_no_thread_changes_the_snapshot_when_an_update_has_failed() -> None:
    updates = DeltaTransport(Recorder(fails=True), "xor", "xxh3-128", 10**6)
    updates.send(holder(0), 1, many(1.0))
    with pytest.raises(EngineError, match="the engine is gone") as caught:
        updates.send(holder(1), 2, many(2.0))
    # An error that is kept keeps its frames, and what they have begun.
    assert caught.tb is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("delta", "piece"))]


class SlowEngine:
    """Answers 200 to a bucket that is sent once `go` is set, and counts these answers; reads no files."""

    def __init__(self) -> None:
        self.go, self.arrived, self.answers = threading.Event(), threading.Event(), 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                sent = "file=" not in self.path
                if sent:
                    outer.arrived.set()
                    outer.go.wait(20)
                    outer.answers += 1
                self.send_response(200 if sent else 400)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def slow() -> Iterator[SlowEngine]:
    engine = SlowEngine()
    yield engine
    engine.go.set()
    engine.server.shutdown()
    engine.server.server_close()


@pytest.mark.parametrize("deltas", [True, False])
def test_an_update_that_fails_ends_with_its_requests(slow: SlowEngine, deltas: bool) -> None:
    engine = Engine("e", slow.url, "embedded", True, 0, weight_transports=("tensor",), delta_carriers=("tensor",))

    def fails(items: list[Any]) -> Iterator[Any]:
        yield from items
        assert slow.arrived.wait(20)
        threading.Timer(0.2, slow.go.set).start()
        raise EngineError("a rank is gone")

    with pytest.raises(EngineError, match="a rank is gone"):
        if deltas:
            about = VersionDelta(2, 1, "a", "xor", "xxh3-128")
            TensorCarrier(1, 20).send_delta([engine], about, fails([(b"bucket", False)]))
        else:
            TensorTransport(1, 20).send([engine], 2, fails(list(weights(1.0))))
    assert slow.answers == 1


@pytest.mark.parametrize("keep", [False, True])
def test_a_directory_that_no_engine_could_read_is_removed(tmp_path: Path, keep: bool) -> None:
    def write(path: Path, weights: Weights) -> int:
        path.mkdir()
        return 0

    # Nothing listens on port 0.
    gone = Engine("e", "http://127.0.0.1:0", "embedded", True, 0, weight_transports=("disk",))
    with pytest.raises(EngineError, match="rank 0 to engine e"):
        DiskTransport(str(tmp_path), write, 5, keep_files=keep).send([gone], 2, weights(1.0))
    assert [path.name for path in tmp_path.rglob("weight_v*")] == ["weight_v000002"] * keep


def test_engines_say_which_carriers_of_deltas_they_take(tmp_path: Path) -> None:
    def engine(*carriers: str) -> Engine:
        return Engine("e", "http://h:1", "of-tomorrow", True, 0, weight_transports=("tensor",), delta_carriers=carriers)

    def on_disk(local: str | None) -> DiskCarrier:
        return DiskCarrier(str(tmp_path), local, lambda path, weights: 0, 5)

    TensorCarrier(1, 5).check([engine("tensor", "disk")])
    on_disk(None).check([engine("tensor", "disk")])
    on_disk("/local").check([engine("checkpoint")])
    with pytest.raises(NotAvailable, match="--update-weight-local-checkpoint-dir DIR: engine e loads"):
        on_disk(None).check([engine("disk"), engine("checkpoint")])
    for carrier in (TensorCarrier(1, 5), on_disk("/local")):
        with pytest.raises(NotAvailable, match=rf"engine e \(of-tomorrow\) takes no deltas by {carrier.name}"):
            carrier.check([engine()])
