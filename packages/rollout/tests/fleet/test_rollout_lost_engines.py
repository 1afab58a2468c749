"""Engines as processes that are killed or stopped: what they had in flight goes on, and they come back."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.process import EngineProcess
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.restarts import RestartLimits, Restarts
from slime.rollout.fleet.router import Router
from slime.rollout.fleet.watched import FleetOptions
from slime.types.errors import EngineError, WrongState

# An engine process in a few lines: its answer to /generate is its name. One that "dies" does so at the first request;
# one that "stops" fails that request and ends a little later; one that "holds" answers no prompt that begins with 9,
# but its successor does.
ENGINE = """
    import http.server, json, os, sys, threading, time
    announce, name, behaviour = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    version = ["0"]
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def answer(self, value):
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def do_GET(self):
            self.answer({"weight_version": version[0]})
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            if self.path == "/update_weights_from_disk":
                version[0] = body["weight_version"]
            if self.path != "/generate":
                return self.answer({})
            if behaviour == "stops":
                threading.Timer(0.2, os._exit, [0]).start()
                self.close_connection = True
                return self.send_error(500, "the engine is stopping")
            if behaviour == "dies":
                print("the last words", flush=True); os._exit(3)
            print("has", body["input_ids"], flush=True)
            while behaviour == "holds" and body["input_ids"][0][0] == 9:
                time.sleep(0.01)
            meta = {"finish_reason": {"type": "stop"}, "weight_version": version[0], "output_token_logprobs": []}
            self.answer([{"text": name, "meta_info": meta} for _ in body["input_ids"]])
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    os.write(announce, json.dumps({"port": server.server_port}).encode() + b"\\n")
    server.serve_forever()
"""
CODE = textwrap.dedent(ENGINE)
LIMITS = RestartLimits(most=2, window_seconds=600, start_seconds=120)


class Engines:
    """A fleet of such processes, and its weights."""

    def __init__(self, behaviours: tuple[str, ...], limits: RestartLimits | None = LIMITS, **options: Any) -> None:
        processes = [start(f"engine-{i}", behaviour) for i, behaviour in enumerate(behaviours)]
        self.loop = LoopThread()
        self.fleet = Fleet(processes, self.loop, FleetOptions(restarts=limits, **options))
        self.fleet.start()
        self.weights = EngineWeights(self.fleet, 60)
        self.members = self.fleet.members

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run(coroutine, timeout=120)

    def send(self, prompt: list[int], member: Member | None = None) -> Any:
        """Returns the future name of the engine that answers."""

        async def ask() -> str:
            answers = await self.fleet.generate([prompt], [{}], rids=[str(prompt)], member=member)
            return str(answers[0]["text"])

        return asyncio.run_coroutine_threadsafe(ask(), self.loop.loop)

    def has(self, number: int, prompt: list[int]) -> bool:
        return f"has [{prompt}]" in self.members[number].engine.last_lines  # type: ignore[attr-defined]

    def signal(self, number: int, which: signal.Signals) -> int:
        pid = self.members[number].engine.pid  # type: ignore[attr-defined]
        os.kill(pid, which)
        return int(pid)

    def give(self, number: int, version: int) -> None:
        """Loads weights, as the trainer does in an update."""
        self.run(self.members[number].client.update_weights_from_disk("", version))


def start(name: str, behaviour: str) -> EngineProcess:
    behaviours = itertools.chain([behaviour], itertools.repeat("answers" if behaviour == "holds" else behaviour))
    command = lambda announce, parent: [sys.executable, "-c", CODE, str(announce), name, next(behaviours)]  # noqa: E731
    return EngineProcess(name, "embedded", command).wait_ready(120)


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def open_engines() -> Iterator[Callable[..., Engines]]:
    opened: list[Engines] = []

    def make(*behaviours: str, **options: Any) -> Engines:
        opened.append(Engines(behaviours, **options))
        return opened[-1]

    yield make
    for engines in opened:
        engines.fleet.stop(0)
        engines.loop.stop()


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_of_an_engine_that_dies_or_hangs_go_on_and_it_comes_back(open_engines, which) -> None:
    engines = open_engines("holds", "answers", health_interval=0.05, health_timeout=3.0)
    lost = engines.members[0]
    held = engines.send([9, 1])
    wait_for(lambda: engines.has(0, [9, 1]))
    pid = engines.signal(0, which)
    # At the other engine, if not at the successor, which may be back before the lost connection is noticed.
    assert held.result(120) in ("engine-0", "engine-1")
    wait_for(lambda: not lost.out)
    assert engines.fleet.error is None and engines.fleet.num_restarts == 1
    assert lost.engine.pid != pid and not psutil.pid_exists(pid) and lost.healthy
    assert engines.send([1], lost).result(120) == "engine-0"


def test_requests_of_the_only_engine_wait_for_its_successor(open_engines) -> None:
    engines = open_engines("answers")
    addresses: list[str] = []
    engines.fleet.on_new_address(lambda: addresses.append(engines.members[0].url))
    before = engines.members[0].url
    stopped = psutil.Process(engines.signal(0, signal.SIGSTOP))
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED)
    waiting = engines.send([1])
    wait_for(lambda: engines.fleet.router.in_flight)
    engines.signal(0, signal.SIGKILL)
    assert waiting.result(120) == "engine-0"
    assert addresses == [engines.members[0].url] != [before]


def test_a_request_for_one_engine_waits_for_it_where_it_will_be_back(open_engines) -> None:
    engines = open_engines("answers", "answers")
    engines.signal(0, signal.SIGKILL)
    wait_for(lambda: engines.members[0].out)
    assert engines.send([1], engines.members[0]).result(120) == "engine-0"


def test_an_engine_that_dies_again_and_again_ends_the_fleet_with_its_name_and_last_lines(open_engines) -> None:
    engines = open_engines("dies")
    words = (
        r"(?s)engine-0 was started again 2 times within 600 s.*--rollout-engine-max-restarts.*exit code 3.*last words"
    )
    with pytest.raises(EngineError, match=words):
        engines.send([1]).result(120)
    with pytest.raises(EngineError, match="engine-0"):
        engines.send([1]).result(120)


def test_an_engine_that_hangs_again_at_once_is_started_again_once_more(open_engines) -> None:
    engines = open_engines("answers", health_interval=0.5, health_timeout=1.5)
    ready = start("engine-0", "answers")
    engines.members[0].engine._start_again = lambda: ready  # type: ignore[attr-defined]
    # Before its first probe.
    engines.fleet.on_new_address(lambda: engines.members[0].url == ready.url and os.kill(ready.pid, signal.SIGSTOP))
    engines.signal(0, signal.SIGSTOP)
    wait_for(lambda: engines.fleet.num_restarts == 2 and not engines.members[0].out, 60)
    assert engines.send([1]).result(120) == "engine-0"


def test_an_engine_that_the_system_cannot_start_again_ends_the_fleet(open_engines) -> None:
    engines = open_engines("answers")

    def full() -> EngineProcess:
        raise OSError(24, "Too many open files")

    engines.members[0].engine._start_again = full  # type: ignore[attr-defined]
    engines.signal(0, signal.SIGKILL)
    with pytest.raises(EngineError, match="engine-0 cannot be started again: .*Too many open files"):
        engines.send([1]).result(60)


def test_a_request_that_an_engine_fails_while_it_ends_is_sent_again(open_engines) -> None:
    engines = open_engines("stops", "answers")
    assert engines.send([1], engines.members[1]).result(120) == "engine-1"
    engines.members[0].engine._start_again = lambda: start("engine-0", "answers")  # type: ignore[attr-defined]
    assert engines.send([1], engines.members[0]).result(120) == "engine-0"


def test_without_restarts_the_death_of_one_engine_ends_the_fleet(open_engines) -> None:
    engines = open_engines("answers", "answers", limits=None)
    engines.signal(0, signal.SIGKILL)
    wait_for(lambda: engines.fleet.error)
    with pytest.raises(EngineError, match=r"engine-0 .*SIGKILL"):
        engines.send([1]).result(120)
    assert engines.fleet.num_restarts == 0


def test_an_engine_that_comes_back_serves_once_it_has_the_weights_of_the_others(open_engines) -> None:
    engines = open_engines("answers", "answers")
    lost, weights = engines.members[0], engines.weights
    engines.run(weights.begin(3))
    for number in (0, 1):
        engines.give(number, 3)
    engines.run(weights.commit(3))
    engines.signal(0, signal.SIGKILL)
    wait_for(lambda: lost.awaits_weights)
    pinned = engines.send([1], lost)
    assert [engines.send([2]).result(120) for _ in range(4)] == ["engine-1"] * 4
    assert engines.run(weights.begin_joining(3)) == [lost] and not pinned.done()
    # The others serve meanwhile.
    assert engines.send([2]).result(120) == "engine-1"
    engines.give(0, 3)
    engines.run(weights.commit(3))
    assert pinned.result(120) == "engine-0" and not lost.awaits_weights and lost.weight_version == 3


def test_weights_that_the_others_do_not_have_come_with_the_next_update(open_engines) -> None:
    engines = open_engines("answers", "answers")
    lost, weights = engines.members[0], engines.weights
    engines.run(weights.begin(3))
    for number in (0, 1):
        engines.give(number, 3)
    engines.run(weights.commit(3))
    engines.signal(0, signal.SIGKILL)
    wait_for(lambda: lost.awaits_weights)
    pinned = engines.send([1], lost)
    assert engines.run(weights.begin_joining(4)) == []
    # Waiting for it could be waiting for ever: the update may wait for this request.
    assert pinned.result(120) == "engine-1"
    assert engines.run(weights.begin(4)) == engines.members
    for number in (0, 1):
        engines.give(number, 4)
    engines.run(weights.commit(4))
    assert engines.send([1], lost).result(120) == "engine-0" and weights.version == 4


def test_the_only_engine_gets_newer_weights_than_it_had(open_engines) -> None:
    engines = open_engines("answers")
    weights = engines.weights
    engines.run(weights.begin(3))
    engines.give(0, 3)
    engines.run(weights.commit(3))
    engines.signal(0, signal.SIGKILL)
    wait_for(lambda: engines.members[0].awaits_weights)
    waiting = engines.send([1])
    assert engines.run(weights.begin_joining(4)) == engines.members
    engines.give(0, 4)
    engines.run(weights.commit(4))
    assert waiting.result(120) == "engine-0" and weights.version == 4


def test_an_engine_that_dies_during_an_update_is_left_out_of_it(open_engines) -> None:
    engines = open_engines("answers", "answers")
    lost, weights = engines.members[0], engines.weights
    engines.run(weights.begin(1))
    engines.signal(0, signal.SIGKILL)
    engines.give(1, 1)
    engines.run(weights.commit(1))
    assert weights.version == 1 and engines.send([1]).result(120) == "engine-1"
    wait_for(lambda: lost.awaits_weights)


def test_requests_wait_for_the_update_that_is_repeated_after_a_death(open_engines) -> None:
    engines = open_engines("answers", "answers")
    weights = engines.weights
    engines.run(weights.begin(1))
    waiting = engines.send([1])
    engines.signal(0, signal.SIGKILL)
    engines.run(weights.abort(1, "the transfer failed"))
    with pytest.raises(WrongState, match="the transfer failed"):
        weights.check_serving()
    assert not waiting.done()
    for member in engines.run(weights.begin(1)):
        engines.run(member.client.update_weights_from_disk("", 1))
    engines.run(weights.commit(1))
    assert waiting.result(120) in ("engine-0", "engine-1")


def test_a_fleet_that_ends_during_a_restart_leaves_no_process_and_no_error(open_engines, tmp_path, caplog) -> None:
    engines = open_engines("answers")
    engines.members[0].engine._start_again = lambda: silent(tmp_path)  # type: ignore[attr-defined]
    engines.signal(0, signal.SIGKILL)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    engines.fleet.restarts.stop()
    wait_for(lambda: not engines.fleet._returning)
    wait_for(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))
    assert engines.fleet.error is None and "did not start again" not in caplog.text


def silent(directory: Any) -> EngineProcess:
    """An engine that never says that it serves."""
    code = f"import os, time; open({str(directory / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    return EngineProcess("silent", "embedded", lambda announce, parent: [sys.executable, "-c", code])


def test_an_engine_is_stopped_where_no_signal_may_be_sent_to_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def as_on_macos(group: int, number: int) -> None:
        if psutil.pid_exists(group) and psutil.Process(group).status() == psutil.STATUS_ZOMBIE:
            raise PermissionError(1, "Operation not permitted")
        send(group, number)

    send = os.killpg
    monkeypatch.setattr(os, "killpg", as_on_macos)
    engine = silent(tmp_path)
    engine.kill()
    wait_for(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_ZOMBIE)
    engine.stop()
    assert engine.poll() == -signal.SIGKILL


def test_sessions_move_from_an_engine_that_is_out() -> None:
    async def check() -> None:
        members: Any = [Named("a"), Named("b")]
        router = Router(members, 10)
        async with router.admit(1, "s") as first:
            assert first.name == "a"
        router.take_out(members[0], awaited=True)
        async with router.admit(1, "s") as second, router.admit(1) as third:
            assert (second.name, third.name) == ("b", "b")
        router.take_out(members[1], awaited=True)
        waiting = asyncio.ensure_future(admitted(router))
        pinned = asyncio.ensure_future(admitted(router, members[0]))
        await asyncio.wait({waiting}, timeout=0.01)
        assert not waiting.done() and not router.in_rotation
        router.put_back(members[1])
        assert await waiting == "b" and not pinned.done()
        router.take_out(members[0], awaited=False)
        assert await pinned == "b"

    asyncio.run(asyncio.wait_for(check(), 60))


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


async def admitted(router: Router[Any], engine: Any = None) -> str:
    async with router.admit(1, engine=engine) as chosen:
        return str(chosen.name)


def test_an_engine_that_is_back_as_the_fleet_ends_is_ended_unless_somebody_has_it() -> None:
    left, taken = Restarts(LIMITS), Restarts(LIMITS)
    orphan, kept = left.start(start("engine-0", "answers")), taken.start(start("engine-1", "answers"))
    taken.taken(kept)
    left.stop(), taken.stop()
    with kept:
        assert not psutil.pid_exists(orphan.pid) and psutil.pid_exists(kept.pid)
        with pytest.raises(EngineError, match="engine-0 is not started again: the fleet has ended"):
            left.start(orphan)


def test_restarts_hold_up_no_other_work(open_engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = open_engines("answers", "answers")
    going_on, begun, real = threading.Event(), [], engines.fleet.restarts.start

    def slow(engine: EngineProcess) -> EngineProcess:
        begun.append(engine)
        going_on.wait(60)
        return real(engine)

    monkeypatch.setattr(engines.fleet.restarts, "start", slow)
    engines.loop.loop.call_soon_threadsafe(engines.loop.loop.set_default_executor, ThreadPoolExecutor(1))
    for number in range(2):
        engines.signal(number, signal.SIGKILL)
    wait_for(lambda: len(begun) == 2)
    try:
        assert engines.run(asyncio.wait_for(asyncio.to_thread(lambda: "free"), 20)) == "free"
    finally:
        going_on.set()
    wait_for(lambda: not any(member.out for member in engines.members))
