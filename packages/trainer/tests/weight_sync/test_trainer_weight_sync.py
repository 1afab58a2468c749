"""Weights over HTTP to engines that stand in, within the transaction of a rollout service that stands in."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import torch
from safetensors.torch import load, load_file
from trainer_tiny import Runner, alone, make_settings

from slime.trainer.checkpoints import checkpoint
from slime.trainer.checkpoints.hf_directory import as_dtype
from slime.trainer.weight_sync.base import Weights, WeightTransport, buckets
from slime.trainer.weight_sync.disk import DiskTransport
from slime.trainer.weight_sync.sender import WeightSender
from slime.trainer.weight_sync.tensor import TensorTransport
from slime.trainer.weight_sync.transaction import push as push_together
from slime.types.clients import Engine
from slime.types.errors import DeadlineExceeded, EngineError, NotAvailable, WrongState
from slime.types.plugins import find_function

TRANSPORTS = {"embedded": ("tensor", "disk"), "sglang": ("nccl", "disk")}


class StandInEngine:
    """Collects what is posted; answers with `status` and `answer`, or not at all before `silent` is set. Buckets in
    `files` are read, and collected as those that were sent, save empty ones; or refused; or nothing is known of them.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], str, bytes]] = []
        self.status, self.answer = 200, dict[str, Any](success=True)
        self.silent: threading.Event | None = None
        self.files = "read"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                url = urlsplit(self.path)
                body = self.rfile.read(int(self.headers["Content-Length"]))
                query = dict(parse_qsl(url.query))
                status, answer = outer.status, outer.answer
                file = query.get("file")
                if file and outer.files == "read":
                    body, answer = Path(file).read_bytes(), answer | {"file": file}
                if file and outer.files == "refused":
                    status, answer = 400, {"error": "the body is empty"}
                elif body and (not file or load(body)):
                    outer.requests.append((url.path, query, self.headers["Content-Type"], body))
                if outer.silent is not None:
                    outer.silent.wait(30)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def describe(self, name: str, kind: str = "embedded") -> Engine:
        url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return Engine(name, url, kind, True, 0, weight_transports=TRANSPORTS[kind])


class StandInRollout:
    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.calls: list[tuple[Any, ...]] = []

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        self.calls.append(("begin", weight_version))
        return self.engines

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        assert timeout is not None and self.calls[-1][0] == "begin"

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.calls.append(("commit", weight_version))

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        self.calls.append(("abort", weight_version, reason))


def push(rollout: Any, transport: WeightTransport, version: int, weights: Weights, timeout_seconds: float) -> int:
    return push_together(rollout, alone(), version, lambda e: transport.send(e, version, weights), timeout_seconds)


@pytest.fixture
def engines() -> Iterator[list[StandInEngine]]:
    servers = [StandInEngine(), StandInEngine()]
    yield servers
    for server in servers:
        if server.silent is not None:
            server.silent.set()
        server.server.shutdown()
        server.server.server_close()
        server.thread.join(120)


def test_projections_that_sglang_loads_as_one_are_in_one_bucket():
    """It drops each of them that comes without the other."""
    low = torch.float8_e4m3fn
    weights: list[tuple[str, torch.Tensor]] = []
    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        for name, dtype in (
            ("q_a_proj.weight", low), ("q_a_proj.weight_scale_inv", torch.float32), ("q_b_proj.weight", low),
            ("kv_a_proj_with_mqa.weight", low), ("kv_a_proj_with_mqa.weight_scale_inv", torch.float32),
            ("indexer.wk.weight", low), ("indexer.wk.weight_scale_inv", torch.float32), ("o_proj.weight", low),
        ):  # fmt: skip
            weights.append((f"{layer}.{name}", torch.zeros(16).to(dtype)))
    # With plain queries, and an indexer in bfloat16, nothing waits.
    weights += [("model.layers.2.self_attn.kv_a_proj_with_mqa.weight", torch.zeros(8).bfloat16())]
    weights += [("model.layers.2.self_attn.indexer.wk.weight", torch.zeros(8).bfloat16())]
    weights += [("model.layers.3.self_attn.q_a_proj.weight", torch.zeros(8).bfloat16())]
    for most in (1, 40, 100, 200):
        got = list(buckets(iter(weights), max_bytes=most))
        names = [name for bucket, _ in got for name in bucket]
        assert sorted(names) == sorted(name for name, _ in weights)
        place = {name: number for number, (bucket, _) in enumerate(got) for name in bucket}
        for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
            for end in ("weight", "weight_scale_inv"):
                assert place[f"{layer}q_a_proj.{end}"] == place[f"{layer}kv_a_proj_with_mqa.{end}"]
            assert place[f"{layer}indexer.wk.weight"] == place[f"{layer}indexer.wk.weight_scale_inv"]


def test_buckets_hold_every_tensor_once():
    weights = [(f"w{i}", torch.zeros(n)) for i, n in enumerate((2, 2, 9, 1))]
    got = list(buckets(iter(weights), max_bytes=20))
    assert [(list(b), last) for b, last in got] == [(["w0", "w1"], False), (["w2"], False), (["w3"], True)]
    assert [last for _, last in buckets(iter(()), 20)] == [True]


@pytest.mark.parametrize("files", ["read", "refused", "unknown"])
def test_tensors_go_to_every_engine_within_the_transaction(tied_model: str, engines: list[StandInEngine], files: str):
    """Bodies are sent to all engines where one of them does not read files."""
    backend = Runner(make_settings(tied_model)).backend
    rollout = StandInRollout([e.describe(f"engine-{i}") for i, e in enumerate(engines)])
    engines[1].files = files
    transport = TensorTransport(8_000, 10)
    for version in (6, 7):
        for engine in engines:
            engine.requests.clear()
        sent = push(rollout, transport, version, as_dtype(backend.named_weights(), torch.bfloat16), 10)
    transport.close()
    assert rollout.calls[-2:] == [("begin", 7), ("commit", 7)]
    assert all(("file" in query) == (files == "read") for engine in engines for _, query, _, _ in engine.requests)
    expected = dict(backend.policy.named_parameters())
    for engine in engines:
        got: dict[str, torch.Tensor] = {}
        for path, query, content_type, body in engine.requests:
            assert (path, content_type) == ("/update_weights_from_tensor", "application/octet-stream")
            assert query["weight_version"] == "7"
            assert len(body) < 8_000 + 4_000
            got |= load(body)
        assert [q["last"] for _, q, _, _ in engine.requests] == ["false"] * (len(engine.requests) - 1) + ["true"]
        assert len(engine.requests) > 2
        assert sum(len(body) for *_, body in engine.requests) == sent
        # The tied output layer goes once, as the embedding.
        assert got.keys() == expected.keys() and "lm_head.weight" not in got
        assert all(torch.equal(got[name], weight.detach().cpu().bfloat16()) for name, weight in expected.items())


def test_a_directory_is_written_read_and_removed(model: str, engines: list[StandInEngine], tmp_path: Path):
    backend = Runner(make_settings(model)).backend
    seen: list[dict[str, torch.Tensor]] = []

    def write(path: Path, weights: Any) -> int:
        size = checkpoint.write_model(path, weights, backend.weight_sizes(), torch.float32, Path(model))
        seen.append(load_file(path / "model.safetensors"))
        return size

    rollout = StandInRollout([engines[0].describe("engine-0", kind="sglang")])
    for keep in (False, True):
        transport = DiskTransport(str(tmp_path), write, 10, keep_files=keep)
        push(rollout, transport, 12, backend.named_weights(), 10)
        kept = list(tmp_path.rglob("weight_v000012"))
        assert len(kept) == keep
        transport.close()
    path, _, content_type, body = engines[0].requests[-1]
    assert (path, content_type) == ("/update_weights_from_disk", "application/json")
    assert json.loads(body) == {
        "model_path": str(kept[0]),
        "weight_version": "12",
        "flush_cache": False,
    }
    assert seen[0].keys() == dict(backend.policy.named_parameters()).keys()


@pytest.mark.parametrize(
    ("status", "answer"), [(500, {"error": "no memory"}), (200, {"success": False, "message": "no memory"})]
)
def test_a_failing_engine_aborts_and_is_named(
    model: str, engines: list[StandInEngine], status: int, answer: dict[str, Any]
):
    backend = Runner(make_settings(model)).backend
    engines[1].status, engines[1].answer = status, answer
    rollout = StandInRollout([e.describe(f"engine-{i}") for i, e in enumerate(engines)])
    with pytest.raises(EngineError, match=r"engine engine-1 .*bucket 0 \(model.embed_tokens.weight.*no memory"):
        push(rollout, TensorTransport(8_000, 10), 1, backend.named_weights(), 10)
    assert [call[0] for call in rollout.calls] == ["begin", "abort"]
    assert "engine-1" in rollout.calls[1][2]


def test_an_engine_that_reads_no_more_files_fails_the_update_and_is_sent_the_next(
    model: str, engines: list[StandInEngine]
):
    """Another engine may have been started at its address."""
    backend = Runner(make_settings(model)).backend
    rollout, transport = StandInRollout([engines[0].describe("engine-0")]), TensorTransport(8_000, 10)
    push(rollout, transport, 1, backend.named_weights(), 10)
    engines[0].files = "unknown"
    engines[0].requests.clear()
    with pytest.raises(EngineError, match="engine-0 at http.* did not read a bucket"):
        push(rollout, transport, 2, backend.named_weights(), 10)
    assert rollout.calls[-1][0] == "abort" and not engines[0].requests
    sent = push(rollout, transport, 3, backend.named_weights(), 10)
    transport.close()
    assert sum(len(body) for *_, body in engines[0].requests) == sent > 0


def test_after_an_update_that_failed_the_next_one_is_written_to_other_memory(model: str, engines: list[StandInEngine]):
    """An engine that did not answer in time may still read the memory of the one that failed."""
    backend = Runner(make_settings(model)).backend
    rollout, transport = StandInRollout([engines[0].describe("engine-0")]), TensorTransport(10**9, 10)
    push(rollout, transport, 1, backend.named_weights(), 10)
    with (memory := open(engines[0].requests[-1][1]["file"], "rb")):  # noqa: SIM115
        first = memory.read()
        engines[0].status = 500
        with pytest.raises(EngineError):
            push(rollout, transport, 2, backend.named_weights(), 10)
        engines[0].status = 200
        push(rollout, transport, 3, ((name, tensor + 1) for name, tensor in backend.named_weights()), 10)
        memory.seek(0)
        assert memory.read() == first
    transport.close()


def test_an_engine_that_is_gone_or_silent(model: str, engines: list[StandInEngine]):
    backend = Runner(make_settings(model)).backend
    gone = Engine("engine-9", "http://127.0.0.1:1", "embedded", True, 0, weight_transports=TRANSPORTS["embedded"])
    with pytest.raises(EngineError, match="engine-9"):
        push(StandInRollout([gone]), TensorTransport(10**9, 5), 1, backend.named_weights(), 10)
    engines[0].silent = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"engine-0.*no answer within 0\.2 s"):
        push(
            StandInRollout([engines[0].describe("engine-0")]),
            TensorTransport(10**9, 0.2),
            1,
            backend.named_weights(),
            10,
        )
    assert engines[0].requests == []


def test_safetensors_are_not_sent_to_sglang(model: str, engines: list[StandInEngine]):
    rollout = StandInRollout([engines[0].describe("engine-0", kind="sglang")])
    with pytest.raises(
        NotAvailable, match=r"transport tensor and engine engine-0 \(sglang\) .*: it takes weights by nccl or disk"
    ):
        push(rollout, TensorTransport(10**9, 5), 1, iter(()), 10)
    assert engines[0].requests == []


def test_the_first_failure_is_the_one_that_is_raised(engines: list[StandInEngine]):
    class Refusing(StandInRollout):
        def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
            raise WrongState("not open")

    engines[0].status = 503
    with pytest.raises(EngineError, match="status 503"):
        push(Refusing([engines[0].describe("engine-0")]), TensorTransport(10**9, 5), 1, iter(()), 10)


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_a_function_of_the_user_publishes_each_version_before_engines_read_it(
    model: str, engines: list[StandInEngine], tmp_path: Path, mode: str
):
    (tmp_path / "publish.py").write_text(
        "import os\nseen = []\ndef commit(args, version_dir, rollout_engines):\n"
        "    names = [engine.name for engine in rollout_engines]\n"
        "    seen.append((args.lr, os.path.basename(version_dir), bool(os.listdir(version_dir)), names))\n"
        "    if len(seen) == 3:\n        raise RuntimeError('volume is full')\n"
    )
    path = f"{tmp_path}/publish.py:commit"
    rollout: Any = StandInRollout([replace(engines[0].describe("engine-0"), delta_carriers=("disk",))])
    settings = make_settings(
        model, lr=0.5, update_weight_mode=mode, update_weight_transport="disk", update_weight_disk_dir=str(tmp_path),
        custom_update_weight_post_write_path=path,
    )  # fmt: skip
    runner = Runner(settings)
    sender = WeightSender(settings, alone(), runner.backend, rollout, Path(model))
    seen = find_function(path).__globals__["seen"]
    for version in (1, 2):
        sender.push(version)
        assert len(seen) == version
    assert seen == [(0.5, f"weight_v{version:06d}", True, ["engine-0"]) for version in (1, 2)]
    read = len(engines[0].requests)
    with pytest.raises(RuntimeError, match="volume is full"):
        sender.push(3)
    assert "commit 3" not in rollout.calls and "/update_weights_from_disk" not in [
        request[0] for request in engines[0].requests[read:]
    ]
    sender.close()
