"""Engines as a fleet: which one gets a request, and what happens when one dies."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from aiohttp import web
from rollout_fakes import FakeBuffer, FakeEngine, prompt_groups

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.process import EngineProcess
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.router import Router
from slime.rollout.fleet.watched import FleetOptions
from slime.rollout.launch import engine_url
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.sources import LeasedDataSource
from slime.types.errors import DeadlineExceeded, EngineError, InvalidSetting, WrongState

ENGINES = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]

# An engine process in a few lines: it serves its weight version, and dies of the first /generate.
DIES = """
    import http.server, json, os, sys
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b'{"weight_version": "0"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_POST(self):
            print("the last words", flush=True); os._exit(3)
        def log_message(self, *args): pass
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    os.write(int(sys.argv[1]), json.dumps({"port": server.server_port}).encode() + b"\\n")
    server.serve_forever()
"""


@pytest.fixture
def mortal():
    code = textwrap.dedent(DIES)
    process = EngineProcess(
        "mortal-0", "embedded", lambda announce, parent: [sys.executable, "-c", code, str(announce)]
    )
    yield process.wait_ready(240)
    process.stop(0.1)


def test_an_engine_that_dies_ends_the_rollout_with_its_name_and_last_lines(mortal, make_state):
    state = make_state(mortal, rollout_batch_size=2, use_fault_tolerance=False)
    buffer = FakeBuffer(prompt_groups(2, 1))
    with pytest.raises(EngineError, match=r"(?s)mortal-0.*exit code 3.*the last words"):
        with LeasedDataSource(buffer, worker_id="test") as source:
            generate_rollout(state.args, 0, source)
    assert not buffer.leased and len(buffer.returned) == 2
    with pytest.raises(EngineError, match="mortal-0"):
        with LeasedDataSource(buffer, worker_id="test") as source:
            generate_rollout(state.args, 1, source)


def test_a_death_between_rollouts_is_noticed(mortal, make_state):
    state = make_state(mortal, use_fault_tolerance=False)
    heard: list[EngineError] = []
    done = asyncio.run_coroutine_threadsafe(_wait_for_failure(state.fleet, heard), state.loop.loop)
    mortal._process.kill()
    done.result(10)
    assert "SIGKILL" in str(heard[0]) and not state.fleet.members[0].healthy


class HangingEngine(FakeEngine):
    """An engine that answers no health probe. probed: when each arrived, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.probed: list[float] = []
        super().__init__()

    async def _ok(self, request: web.Request) -> web.Response:
        self.probed.append(time.monotonic())
        return await asyncio.get_running_loop().create_future()


def test_an_engine_that_let_a_probe_time_out_is_asked_again_at_once():
    engine, loop = HangingEngine(), LoopThread()
    fleet = Fleet([engine], loop, FleetOptions(health_interval=1.0, health_timeout=1.0))
    fleet.start()
    try:
        lost = asyncio.run_coroutine_threadsafe(_wait_for_failure(fleet, []), loop.loop)
        lost.result(60)
        assert isinstance(fleet.error, EngineError) and "two health probes" in fleet.error.message
        first, second = engine.probed
        assert second - first < 2.0
    finally:
        fleet.stop()
        loop.stop()
        engine.stop()


async def _wait_for_failure(fleet: Fleet, heard: list[EngineError]) -> None:
    event = asyncio.Event()
    fleet.on_failure(lambda error: (heard.append(error), event.set())[0])
    await event.wait()


def test_an_engine_that_is_not_there_is_named_at_the_start():
    engine = FakeEngine()
    engine.stop()
    loop = LoopThread()
    fleet = Fleet([engine], loop, FleetOptions())
    with pytest.raises(EngineError, match="fake-0"):
        fleet.start()
    fleet.stop()
    loop.stop()


def test_engine_addresses():
    assert engine_url("10.0.0.1:30000") == "http://10.0.0.1:30000" == engine_url("http://10.0.0.1:30000/")
    with pytest.raises(InvalidSetting, match="--rollout-external-engine-addrs must be"):
        engine_url("host")


def test_the_least_loaded_engine_unless_a_session_is_bound():
    async def check() -> None:
        router = Router(ENGINES, 10)
        async with router.admit(3) as first, router.admit(1) as second, router.admit(1) as third:
            assert (first.name, second.name, third.name) == ("a", "b", "b")
            async with router.admit(1, "s") as bound:
                assert bound.name == "b"
        async with router.admit(5), router.admit(1, "s") as bound:
            assert bound.name == "b"
        assert router.in_flight == 0

    asyncio.run(asyncio.wait_for(check(), 10))


def test_the_limit_of_samples_in_flight_holds():
    async def check() -> None:
        router = Router(ENGINES[:1], 4)
        order: list[str] = []

        async def work(name: str, samples: int, gate: asyncio.Event) -> None:
            async with router.admit(samples):
                order.append(name)
                assert router.in_flight <= 4 or router.in_flight == samples
                await gate.wait()

        gates = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(work(str(i), n, g)) for i, (n, g) in enumerate(zip((3, 3, 9), gates, strict=True))]
        await asyncio.sleep(0)
        while not order:
            await asyncio.sleep(0)
        assert order == ["0"]
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks)
        assert sorted(order) == ["0", "1", "2"]

    asyncio.run(asyncio.wait_for(check(), 10))


def test_the_gate_of_weight_updates():
    async def check() -> None:
        router = Router(ENGINES[:1], 4)
        async with router.admit(1):
            with pytest.raises(DeadlineExceeded, match="1 sample is still being generated"):
                await router.drain(0.01)
        await router.drain(1)
        await router.shut("weights change")
        waiting = asyncio.create_task(_admitted(router))
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        await router.open()
        assert await waiting == "a"
        await router.shut("it was aborted", refuse=True)
        with pytest.raises(WrongState, match="it was aborted"):
            await _admitted(router)

    asyncio.run(asyncio.wait_for(check(), 10))


async def _admitted(router: Router) -> str:
    async with router.admit(1) as engine:
        return engine.name
