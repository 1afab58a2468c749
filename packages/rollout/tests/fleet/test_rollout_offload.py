"""Colocated engines: memory released while the trainer works, taken back, and weights in between."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import sglang_recording
from rollout_fakes import FakeBuffer, FakeEngine, prompt_groups

from slime.rollout import launch
from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.watched import FleetOptions
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.sources import LeasedDataSource
from slime.types.clients import RolloutClient
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable, WrongState
from slime.types.rpc import RpcSettings, Server
from slime.v1 import rollout_pb2_grpc

RECORDING = (sys.executable, sglang_recording.__file__)
HELD = [3, 4]


def start(**values: Any) -> EngineProcess:
    options = SGLangOptions(**{"model_path": "/", "gpus": ["0"], "memory_saver": True, "server": RECORDING} | values)
    return start_sglang(options).wait_ready(240)


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with start() as process:
        yield process


@pytest.fixture
def fleet(engine: EngineProcess) -> Iterator[Fleet]:
    fleet = Fleet([engine], LoopThread(), FleetOptions(health_interval=0.02))
    fleet.start()
    yield fleet
    fleet.stop()
    fleet.loop.stop()


@pytest.fixture
def updates(fleet: Fleet) -> Updates:
    return Updates(fleet)


class Updates:
    """EngineWeights, called from the test's thread."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.real = EngineWeights(fleet, wait_seconds=10)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.real, name)
        return lambda *args: self.fleet.loop.run(method(*args), timeout=120)

    def send(self, version: int) -> None:
        self.fleet.loop.run(self.fleet.members[0].client.update_weights_from_disk("/", version), timeout=120)

    def generate(self, prompt: Sequence[int] = (4, 5)) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(
            self.fleet.generate([list(prompt)], [{}], rids=["r"]), self.fleet.loop.loop
        )


def calls(engine: EngineProcess) -> list[str]:
    with urllib.request.urlopen(engine.url + "/calls", timeout=60) as answer:
        return [path for path in json.load(answer)["calls"] if not path.startswith("/health")]


def test_a_colocated_step(updates: Updates, engine: EngineProcess) -> None:
    assert updates.generate().result(10)[0]["meta_info"]["weight_version"] == "0"
    before = len(calls(engine))
    updates.offload([])
    updates.offload([])  # again is the same as once
    with pytest.raises(WrongState, match="the engines do not serve: the engines' memory is released"):
        updates.generate().result(10)
    with pytest.raises(WrongState, match="the engines' weights are released"):
        updates.begin(1)
    updates.onload(["weights"])
    updates.begin(1)
    updates.send(1)
    with pytest.raises(WrongState, match="the engines' kv_cache are released"):
        updates.commit(1)
    updates.onload([])
    updates.commit(1)
    assert updates.generate().result(10)[0]["meta_info"]["weight_version"] == "1"
    assert calls(engine)[before:] == [
        "/pause_generation", "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation",
        "/update_weights_from_disk", "/resume_memory_occupation", "/continue_generation", "/generate",
    ]  # fmt: skip
    assert engine.poll() is None


def test_weights_that_were_given_back_are_not_served_again(updates: Updates) -> None:
    updates.offload([])
    updates.onload([])
    with pytest.raises(WrongState, match="weights were released, and none were sent since"):
        updates.generate().result(10)
    updates.begin(0)
    updates.send(0)
    updates.commit(0)
    assert updates.generate().result(10)


def test_memory_without_weights_is_given_back_and_served_again(updates: Updates) -> None:
    updates.offload(["kv_cache", "cuda_graph"])
    updates.onload(["cuda_graph"])
    with pytest.raises(WrongState, match="do not serve"):
        updates.generate().result(10)
    updates.onload(["kv_cache"])
    assert updates.generate().result(10)


def test_an_engine_with_a_copy_of_its_weights_serves_again() -> None:
    with start(args={"enable_weights_cpu_backup": True}) as process:
        fleet = Fleet([process], LoopThread())
        fleet.start()
        updates = Updates(fleet)
        updates.offload([])
        updates.onload([])
        assert updates.generate().result(10)
        fleet.stop()
        fleet.loop.stop()


def test_a_release_waits_for_requests_and_aborts_those_of_others(updates: Updates, engine: EngineProcess) -> None:
    others = asyncio.run_coroutine_threadsafe(
        updates.fleet.members[0].client.generate(HELD, {}, rid="other"), updates.fleet.loop.loop
    )
    wait_for_call(engine, "/generate")
    updates.offload([])
    assert others.result(10)["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.poll() is None


def test_an_engine_without_its_memory_saver_cannot_release(fleet: Fleet) -> None:
    with start(memory_saver=False) as process:
        other = Fleet([process], LoopThread())
        other.start()
        with pytest.raises(WrongState, match="without --enable-memory-saver"):
            Updates(other).offload([])
        other.stop()
        other.loop.stop()


def test_an_open_update_and_a_part_that_is_none_are_refused(updates: Updates) -> None:
    with pytest.raises(InvalidField, match="one of weights, kv_cache, cuda_graph"):
        updates.offload(["graphs"])
    updates.begin(4)
    with pytest.raises(WrongState, match="weight update 4 is open"):
        updates.offload([])


def test_a_held_engine_is_not_asked_to_generate_for_its_health(updates: Updates, engine: EngineProcess) -> None:
    updates.offload([])
    probes = calls_of_health(engine)
    member = updates.fleet.members[0]
    for _ in range(3):
        updates.fleet.loop.run(member.probe(5.0), timeout=120)
    assert calls_of_health(engine) <= probes + 1
    assert member.healthy and updates.fleet.error is None


def wait_for_call(engine: EngineProcess, path: str) -> None:
    deadline = time.monotonic() + 20
    while path not in calls(engine):
        assert time.monotonic() < deadline, f"{engine.name} was not asked {path}"


def calls_of_health(engine: EngineProcess) -> int:
    with urllib.request.urlopen(engine.url + "/calls", timeout=60) as answer:
        return json.load(answer)["calls"].count("/health_generate")


def test_an_aborted_update_after_a_release_stays_refused(updates: Updates) -> None:
    updates.offload([])
    updates.onload([])
    updates.begin(1)
    updates.abort(1, "the trainer died")
    with pytest.raises(WrongState, match="weight update 1 was aborted: the trainer died"):
        updates.generate().result(10)


def test_the_service_offers_both_calls(make_state: Any) -> None:
    engine = FakeEngine()
    state = make_state(engine)
    service = RolloutService(RolloutSettings(hf_checkpoint="none"), state, "127.0.0.1:1")
    server = Server([(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, service)], RpcSettings(),
                    service_names=["slime.v1.RolloutService"])  # fmt: skip
    try:
        with RolloutClient(server.start()) as client:
            client.offload()
            assert not client.status().engines[0].healthy
            with pytest.raises(InvalidField, match="parts"):
                client.onload(["all"])
            client.onload(["weights"])
            client.onload()
            assert client.status().engines[0].healthy and client.status().engines[0].tp_size == 1
    finally:
        server.stop(0)
        engine.stop()


def test_engines_of_others_say_what_they_are_and_can(engine: EngineProcess, tmp_path: Path) -> None:
    fleet = Fleet([RemoteEngine("external-0", engine.url)], LoopThread())
    fleet.start()
    try:
        member = fleet.members[0]
        assert (member.kind.name, member.abilities.memory_saver, member.abilities.seeded) == ("sglang", True, False)
        assert member.abilities.tp_size == 1
        launch.check_abilities(RolloutSettings(hf_checkpoint="x", colocate=True), fleet)
        with pytest.raises(
            InvalidSetting,
            match="--deterministic requires engines started with --enable-deterministic-inference: .*external-0",
        ):
            launch.check_abilities(RolloutSettings(hf_checkpoint="x", deterministic=True), fleet)
        for family in ("qwen3_vl", "smolvlm"):
            (tmp_path / family).mkdir()
            (tmp_path / family / "config.json").write_text(json.dumps({"model_type": family}))
        launch.check_images(str(tmp_path / "qwen3_vl"), fleet.members)
        with pytest.raises(
            NotAvailable,
            match=r"engine external-0 \(SGLang\) accepts .* only for qwen2_vl, .*, qwen3_5, not for smolvlm .*; use",
        ):
            launch.check_images(str(tmp_path / "smolvlm"), fleet.members)
    finally:
        fleet.stop()
        fleet.loop.stop()
    assert engine.poll() is None


def test_what_waits_for_a_place_is_given_back_without_being_sent(make_state: Any) -> None:
    engine = FakeEngine()
    state = make_state(engine, rollout_batch_size=1, over_sampling_batch_size=6, sglang_server_concurrency=1)
    buffer = FakeBuffer(prompt_groups(6, 1))
    with LeasedDataSource(buffer, worker_id="test") as source:
        output = generate_rollout(state.args, 0, source)
    assert len(output.samples) == 1 and len(buffer.completed) == 1
    assert len(engine.requests) < 6 and len(buffer.returned) == 5
    engine.stop()


def test_a_fleet_that_stops_aborts_what_its_engines_still_do(engine: EngineProcess) -> None:
    fleet = Fleet([engine], LoopThread())
    fleet.start()
    request = Updates(fleet).generate(HELD)
    wait_for_call(engine, "/generate")
    fleet.stop()
    assert request.result(10)[0]["meta_info"]["finish_reason"]["type"] == "abort"
    fleet.loop.stop()
    assert engine.poll() is not None
