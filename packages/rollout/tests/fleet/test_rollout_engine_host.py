"""Engines that a process of their node starts and watches, for a rollout service elsewhere."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import sglang_recording

from slime.rollout import launch
from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.kind import EngineNode
from slime.rollout.engines.sglang import kind
from slime.rollout.engines.sglang import launch as sglang_launch
from slime.rollout.fleet import engine_host
from slime.rollout.fleet.engine_host import EngineHost, reached_at
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import EngineError, InvalidSetting, MissingFile
from slime.types.rpc import RpcSettings

RECORDING = (sys.executable, sglang_recording.__file__)
HELD = [3, 4]


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs and the recording for SGLang; any name is a model's."""
    monkeypatch.setattr(launch, "visible_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(kind, "is_installed", lambda: True)
    monkeypatch.setattr(engine_host, "check_directory", lambda path: None)
    started = sglang_launch.SGLangOptions
    monkeypatch.setattr(sglang_launch, "SGLangOptions", lambda **values: started(**values, server=RECORDING))


def settings(**values: Any) -> RolloutSettings:
    return RolloutSettings(**{"hf_checkpoint": "m", "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2} | values)


@pytest.fixture
def host(on_gpus: None) -> Iterator[EngineHost]:
    host = engine_host.serve(settings(), RpcSettings(), first={"sglang": 6, "embedded": 1})
    yield host
    host.stop()


def watching(host: EngineHost) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(host.watch)
    pool.shutdown(wait=False)
    return future


def processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_engines_have_the_next_numbers_and_a_fleet_elsewhere_leaves_them_running(host: EngineHost) -> None:
    assert [(engine.name, engine.kind) for engine in host.engines] == [("sglang-6", "sglang"), ("sglang-7", "sglang")]
    fleet = Fleet(host.engines, LoopThread())
    fleet.start()
    request: Future[Any] = Future()
    asked = threading.Thread(
        target=lambda: request.set_result(fleet.loop.run(fleet.generate([HELD], [{}], rids=["one"]))), daemon=True
    )
    asked.start()
    deadline = time.monotonic() + 30
    while not fleet.router.in_flight:
        assert asked.is_alive() and time.monotonic() < deadline
    running = {psutil.Process(started.pid) for started in host._started}
    fleet.stop()
    assert request.result(10)[0]["meta_info"]["finish_reason"]["type"] == "abort", "engines of the run end idle"
    fleet.loop.stop()
    assert processes() >= running
    host.stop()
    assert not processes() & running


def test_the_death_of_an_engine_is_told_with_its_name_and_node(host: EngineHost) -> None:
    watch = watching(host)
    assert not watch.done()
    host._started[1]._process.kill()  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"on 127\.0\.0\.1: engine sglang-7 \(pid \d+\) ended with signal SIGKILL"):
        watch.result(30)


def test_a_watch_ends_when_the_engines_are_stopped(host: EngineHost) -> None:
    watch = watching(host)
    host.stop()
    watch.result(30)


def test_an_engine_that_cannot_start_leaves_none_behind(on_gpus: None) -> None:
    before = processes()
    with pytest.raises(EngineError, match="not supported"):
        engine_host.serve(settings(hf_checkpoint="refuse"), RpcSettings())
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus must be at most 4, got 6"):
        engine_host.serve(settings(rollout_num_gpus=6), RpcSettings())
    # One of an earlier test may end meanwhile.
    assert processes() <= before


def test_a_model_that_is_not_on_this_node_is_an_error_before_anything_starts() -> None:
    with pytest.raises(MissingFile, match="--hf-checkpoint: no such directory /nowhere"):
        engine_host.serve(RolloutSettings(hf_checkpoint="/nowhere"), RpcSettings())


def test_a_node_without_its_share_of_embedded_engines_starts_none() -> None:
    assert launch.start_engines(RolloutSettings(hf_checkpoint="m", rollout_num_engines=0)) == []


@pytest.mark.parametrize(
    "url, host, reached",
    [
        ("http://127.0.0.1:5", "192.0.2.7", "http://192.0.2.7:5"),
        ("http://192.0.2.8:5", "192.0.2.7", "http://192.0.2.8:5"),
        ("http://[::1]:5", "2001:db8::1", "http://[2001:db8::1]:5"),
        ("http://127.0.0.2:5", "127.0.0.2", "http://127.0.0.2:5"),
    ],
)
def test_an_engine_on_all_addresses_is_reached_at_that_of_its_node(url: str, host: str, reached: str) -> None:
    assert reached_at(url, host) == reached


def info_of(host: EngineHost) -> dict[str, Any]:
    with urllib.request.urlopen(host._started[0].url + "/server_info", timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_node_starts_its_part_of_an_engine_and_the_first_one_serves(on_gpus: None, rank: int) -> None:
    wide = settings(rollout_num_gpus=None, rollout_num_gpus_per_engine=8)
    node = EngineNode(2, rank, "10.0.0.1:7000")
    host = engine_host.serve(wide, RpcSettings(), first={"sglang": 3}, node=node)
    try:
        info = info_of(host)
        assert (info["tp_size"], info["nnodes"], info["node_rank"], info["dist_init_addr"]) == (
            "8", "2", str(rank), "10.0.0.1:7000",
        )  # fmt: skip
        assert [engine.name for engine in host.engines] == (["sglang-3"] if rank == 0 else [])
        watch = watching(host)
        host._started[0]._process.kill()  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="sglang-3" if rank == 0 else "sglang-3-node-1"):
            watch.result(30)
    finally:
        host.stop()


def test_a_part_of_an_engine_needs_its_share_of_gpus_and_a_kind_that_spans_nodes(
    on_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = EngineNode(2, 0, "10.0.0.1:7000")
    with pytest.raises(InvalidSetting, match="per-engine must be 8, got 16: each of its 2 nodes has 4"):
        engine_host.serve(settings(rollout_num_gpus=None, rollout_num_gpus_per_engine=16), RpcSettings(), node=node)
    monkeypatch.setattr(kind, "is_installed", lambda: False)
    embedded = settings(rollout_num_gpus=None, rollout_num_gpus_per_engine=8)
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus-per-engine 8 requires --rollout-engine sglang"):
        engine_host.serve(embedded, RpcSettings(), node=node)
