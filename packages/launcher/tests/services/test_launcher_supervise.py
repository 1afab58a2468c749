"""Processes on real Ray: what fails, fails at once and by name; what was started, stops."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from slime.launcher.platform.ray_cluster import ray_cluster
from slime.launcher.services.actors import AddressOf
from slime.launcher.services.supervisor import ServiceDied, Supervisor
from slime.types.errors import DeadlineExceeded, EngineError, InvalidField, Unavailable
from slime.types.rpc import RpcSettings

SERVICE = """
    import gc
    import os
    import time
    from slime.types.errors import EngineError, InvalidField

    class Running:
        address = f"here:{os.getpid()}"
        engines = ["an engine"]
        def watch(self):
            while not os.path.exists(self.sign):
                time.sleep(0.05)
            raise EngineError("engine one-0 ended with signal SIGKILL", field="one-0")
        def stop(self, grace_seconds):
            print(gc.get_freeze_count(), "objects are spared", flush=True)
            print(f"has {grace_seconds:g} s", "stopped", sep="\\n", flush=True)

    def preload(*words):
        print("preloads", *words, flush=True)
        raise RuntimeError("serve tells")

    def serve(settings, rpc, **options):
        if settings == "bad":
            raise InvalidField("settings", settings, "good")
        if callable(peer := options.get("peer")):
            print("loaded", flush=True)
            print("knows", peer(), flush=True)
        if wanted := options.get("after"):
            while not (os.path.exists(wanted) and "loaded" in open(wanted).read()):
                time.sleep(0.05)
        print("ready to serve", flush=True)
        running = Running()
        running.sign = options.get("sign")
        return running
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("modules")
    (directory / "a_service.py").write_text(textwrap.dedent(SERVICE))
    # Ray workers import what the driver can.
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(directory), before) if part)
    sys.path.insert(0, str(directory))
    with ray_cluster(None, num_cpus=2):
        yield "a_service"
    sys.path.remove(str(directory))
    os.environ["PYTHONPATH"] = before


@pytest.fixture
def supervisor(service: str, tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", start_seconds=300, stop_seconds=10)
    yield supervisor
    supervisor.stop()


def pid(address: str) -> int:
    return int(address.partition(":")[2])


def test_a_stopped_service_was_asked_first_and_leaves_no_process(supervisor: Supervisor, service: str) -> None:
    one = supervisor.spawn("one", {"num_cpus": 0})
    supervisor.get(one, one.actor.preload.remote(service, "a backend"))
    address = supervisor.start(one, service, "good", RpcSettings())
    process = psutil.Process(pid(address))
    supervisor.stop()
    assert psutil.wait_procs([process], timeout=60)[1] == []
    lines = (supervisor.log_dir / "one.log").read_text().splitlines()
    # With the reason why it did not: the same import may fail with another one later.
    assert lines[0] == "preloads a backend" and "RuntimeError: serve tells" in lines
    assert lines[-4] == "ready to serve" and lines[-2:] == ["has 2.5 s", "stopped"]


def test_collections_of_a_service_skip_what_was_there_when_it_began_to_serve(
    supervisor: Supervisor, service: str
) -> None:
    process = supervisor.spawn("one", {"num_cpus": 0})
    supervisor.start(process, service, "good", RpcSettings())
    supervisor.stop()
    spared = re.search(r"^(\d+) objects are spared$", (supervisor.log_dir / "one.log").read_text(), re.MULTILINE)
    # Ray alone makes more.
    assert spared is not None and int(spared[1]) > 10_000


def test_a_service_that_loads_waits_for_the_address_of_one_that_starts_meanwhile(
    supervisor: Supervisor, service: str
) -> None:
    engine, trainer = supervisor.spawn("engine", {"num_cpus": 0}), supervisor.spawn("trainer", {"num_cpus": 0})
    log = supervisor.log_dir / "trainer.log"
    waits = AddressOf(engine.actor.address.remote(), 60)
    # Ends only if both start at once: the engine serves when the trainer has loaded, and the trainer after the engine.
    address, _ = supervisor.call_once(
        [
            partial(supervisor.start, engine, service, "good", RpcSettings(), after=str(log)),
            partial(supervisor.start, trainer, service, "good", RpcSettings(), peer=waits),
        ]
    )
    assert log.read_text().splitlines()[-3:] == ["loaded", f"knows {address}", "ready to serve"]


def test_a_service_that_another_waits_for_has_a_deadline_and_its_death_is_named(
    supervisor: Supervisor, service: str
) -> None:
    engine, trainer = supervisor.spawn("engine", {"num_cpus": 0}), supervisor.spawn("trainer", {"num_cpus": 0})
    victim = supervisor.get(engine, engine.actor.pid.remote())
    waits = AddressOf(engine.actor.address.remote(), 60)
    with pytest.raises(DeadlineExceeded, match=r"did not start within 0\.1 s"):
        replace(waits, seconds=0.1)()
    supervisor.begin(partial(_kill_when_loaded, supervisor.log_dir / "trainer.log", victim))
    with pytest.raises(ServiceDied, match="engine died"):
        supervisor.call_once(
            [
                partial(supervisor.start, engine, service, "good", RpcSettings(), after=str(supervisor.log_dir / "no")),
                partial(supervisor.start, trainer, service, "good", RpcSettings(), peer=waits),
            ]
        )
    with pytest.raises(Unavailable, match="ended while it started"):
        waits()


def _kill_when_loaded(log: Path, victim: int) -> None:
    while not (log.exists() and "loaded" in log.read_text().splitlines()):
        time.sleep(0.05)
    os.kill(victim, signal.SIGKILL)


def test_what_a_service_raises_is_raised_here(supervisor: Supervisor, service: str) -> None:
    process = supervisor.spawn("one", {"num_cpus": 0})
    with pytest.raises(InvalidField, match="settings: got bad, expected good") as raised:
        supervisor.start(process, service, "bad", RpcSettings())
    assert raised.value.field == "settings"


def test_the_death_of_a_process_ends_every_call_with_its_name_and_last_lines(
    supervisor: Supervisor, service: str
) -> None:
    address = supervisor.start(supervisor.spawn("one", {"num_cpus": 0}), service, "good", RpcSettings())
    never = threading.Event()
    started = time.monotonic()
    with pytest.raises(ServiceDied, match="one died(.|\n)*ready to serve"):
        supervisor.call_all([lambda: os.kill(pid(address), signal.SIGKILL), lambda: never.wait(60)])
    assert time.monotonic() - started < 30
    never.set()


def test_what_a_service_watches_ends_every_call_with_its_own_error(
    supervisor: Supervisor, service: str, tmp_path: Path
) -> None:
    sign = tmp_path / "sign"
    process = supervisor.spawn("engines-0", {"num_cpus": 0})
    supervisor.start(process, service, "good", RpcSettings(), sign=str(sign))
    assert supervisor.get(process, process.actor.engines.remote()) == ["an engine"]
    supervisor.watch(process, process.actor.watch_engines.remote())
    never = threading.Event()
    with pytest.raises(EngineError, match="one-0 ended with signal SIGKILL"):
        supervisor.call_all([sign.touch, lambda: never.wait(60)])

    def broken_by_it() -> None:
        raise EngineError("engine one-0 is gone")

    with pytest.raises(EngineError, match="SIGKILL"):
        supervisor.call(broken_by_it)
    never.set()


def test_services_of_one_kind_are_stopped_together_and_before_those_that_they_need(
    supervisor: Supervisor, service: str
) -> None:
    each = {"num_cpus": 0}
    names = ["buffer", "engines-0", "engines-1", "rollout"]
    started = [supervisor.spawn(name, each) for name in names]
    addresses = supervisor.start_each(started, service, ["good"] * 4, RpcSettings(), [{}] * 4)
    processes = [psutil.Process(pid(address)) for address in addresses]
    supervisor.stop()
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    logs = {name: (supervisor.log_dir / f"{name}.log").read_text() for name in names}
    assert all("stopped" in text for text in logs.values())
    # A reward function may run for ever, and complete groups are in the buffer.
    assert "has 2 s" in logs["rollout"] and "has 2.5 s" in logs["engines-0"] and "has 2.5 s" in logs["buffer"]


def test_stopping_does_not_wait_for_what_has_not_come_up(service: str, tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=300, stop_seconds=600)
    # For ever, as on a busy machine for a while.
    for name in ("buffer", "rollout"):
        supervisor.spawn(name, {"num_gpus": 99})
    began = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 300


def test_no_start_calls_ray_after_its_stop(service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(tmp_path, start_seconds=300, stop_seconds=10)
    process, granting, closed = supervisor.spawn("buffer", {}), threading.Event(), threading.Event()

    def grant(key: object, host: str) -> bytes:
        granting.set()
        closed.wait(60)
        return b""

    def start() -> None:
        with suppress(ServiceDied):
            supervisor.start(process, service, "good", RpcSettings())

    monkeypatch.setattr(supervisor.authority, "grant", grant)
    monkeypatch.setattr(supervisor.authority, "close", closed.set)
    thread = threading.Thread(target=start)
    thread.start()
    assert granting.wait(60)
    supervisor.stop()
    # The thread called Ray while it was stopped, and not later, when Ray may have ended.
    assert [future.done() for future in supervisor._calls] == [True]
    thread.join(60)


def test_the_first_failure_of_several_calls_does_not_wait_for_the_rest(supervisor: Supervisor) -> None:
    never = threading.Event()

    def fail() -> None:
        raise InvalidField("step", 3, "4")

    with pytest.raises(InvalidField):
        supervisor.call_all([lambda: never.wait(60), fail])
    never.set()
    assert supervisor.call_all([lambda: 1, lambda: 2]) == [1, 2]
