"""Sockets of a run, held to the table of docs/security.md, and what another user of the machine gets at them."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import SocketKind
from typing import Any

import psutil
import pytest

from tiny_runs import DEADLINE, quickstart, trained_a_step, wait_for

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
# The doors of a process, by words of its command line.
PROCESSES = {
    "Ray: GCS": "gcs_server",
    "Ray: raylet": "raylet/raylet",
    "Ray: runtime environment agent": "RuntimeEnvAgent|runtime_env/agent",
    "engine: HTTP": "slime.rollout.engines.embedded",
}
WORKER = "ray::"
# The doors of a service besides its own and its Ray worker's.
MORE = {"trainer": "trainer: gloo", "rollout": "router: HTTP"}
SERVED = {"buffer": "buffer", "rollout": "rollout", "trainer-0": "trainer", "trainer-1": "trainer"}
# As any program could: imports come first, for the interpreter's own files may be closed to another user.
STRANGER = """
import grpc, sys
calls = {}
for address in sys.argv[1:]:
    channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)])
    for service, method in (("Buffer", "GetStats"), ("Rollout", "GetStatus"), ("Trainer", "GetInfo")):
        calls[address, method] = channel.unary_unary(f"/slime.v1.{service}Service/{method}")
import os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for (address, method), call in calls.items():
    try:
        call(b"", timeout=60)
        print("LET IN", address, method)
    except grpc.RpcError as error:
        print(error.code().name, address, method)
"""


@dataclass
class Seen:
    """doors: the addresses that each is bound to. strangers: command lines of processes that are not known."""

    doors: dict[str, set[str]] = field(default_factory=dict)
    most: Counter[tuple[str, int]] = field(default_factory=Counter)
    strangers: set[str] = field(default_factory=set)


@pytest.fixture(scope="module")
def opened() -> dict[str, set[str]]:
    """Addresses that each process of the run had sockets at before the first step was trained."""
    return {}


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, opened: dict[str, set[str]]
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run with two ranks that has trained a step, and goes on."""
    output_dir = tmp_path_factory.mktemp("run")
    process = quickstart(output_dir, "--num-rollout", "1000", "--actor-num-gpus-per-node", "2")

    def trains() -> bool:
        for each, address in sockets(process):
            with suppress(psutil.NoSuchProcess):
                opened.setdefault(" ".join(each.cmdline()[:4]), set()).add(address.ip)
        return process.poll() is not None or trained_a_step(output_dir)

    try:
        wait_for(trains, DEADLINE, "a step")
        assert process.poll() is None, process.communicate()[0]
        yield process, output_dir
    finally:
        process.terminate()
        try:
            process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()


def page_doors() -> dict[str, str]:
    table = re.search(r"<!-- doors:.*?-->(.*?)<!-- /doors -->", PAGE.read_text(), re.DOTALL)
    assert table is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].strip().splitlines()[2:]]
    return {row[0]: row[1] for row in rows}


def sockets(process: subprocess.Popen[str]) -> Iterator[tuple[psutil.Process, Any]]:
    """Yields the processes of a run with the addresses at which they listen, or take datagrams."""
    with suppress(psutil.NoSuchProcess):
        driver = psutil.Process(process.pid)
        for each in [driver, *driver.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                for socket in each.net_connections("inet"):
                    takes_any = socket.type is SocketKind.SOCK_DGRAM and socket.laddr and not socket.raddr
                    if socket.status == psutil.CONN_LISTEN or takes_any:
                        yield each, socket.laddr


def look(process: subprocess.Popen[str], output_dir: Path, seen: Seen) -> None:
    addresses = json.loads((output_dir / "access" / "addresses.json").read_text())
    served = {int(address.rpartition(":")[2]): SERVED[name] for name, address in addresses.items()}
    driver = psutil.Process(process.pid)
    of_processes: dict[psutil.Process, list[Any]] = {}
    for each, address in sockets(process):
        of_processes.setdefault(each, []).append(address)
    for each, listening in of_processes.items():
        try:
            line = " ".join(each.cmdline())
        except psutil.NoSuchProcess:
            continue
        role = next((served[address.port] for address in listening if address.port in served), None)
        for address in listening:
            if address.port in served:
                door = f"{served[address.port]}: gRPC"
            elif each.pid == driver.pid:
                door = "Ray: driver"
            else:
                door = next((name for name, words in PROCESSES.items() if re.search(words, line)), "")
            if not door and line.startswith(WORKER):
                # A worker of Ray has one socket of its own; what a service has besides is in MORE.
                seen.most["Ray: worker", each.pid] += 1
                door = MORE.get(role or "", "") if seen.most["Ray: worker", each.pid] > 1 else "Ray: worker"
            if not door:
                seen.strangers.add(f"{line[:200]} at {address}")
            seen.doors.setdefault(door, set()).add(address.ip)
    for (door, pid), count in list(seen.most.items()):
        roles = _roles(driver, served).get(pid, set())
        if door == "Ray: worker" and count > 1 and roles != {"trainer"} and (count, roles) != (2, {"rollout"}):
            seen.strangers.add(f"process {pid}: {count} sockets of a Ray worker")
    seen.most.clear()


def _roles(driver: psutil.Process, served: dict[int, str]) -> dict[int, set[str]]:
    """Returns the services that each process serves."""
    found: dict[int, set[str]] = {}
    for each in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            ports = {c.laddr.port for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
            found[each.pid] = {served[port] for port in ports & served.keys()}
    return found


def is_within(bound: str, allowed: str) -> bool:
    assert allowed == "loopback", f"docs/security.md: {allowed} is nothing that this test knows"
    return ipaddress.ip_address(bound.removeprefix("::ffff:")).is_loopback


def test_every_socket_of_a_run_is_on_the_page_and_no_wider(
    running: tuple[subprocess.Popen[str], Path], opened: dict[str, set[str]]
) -> None:
    process, output_dir = running
    seen, doors = Seen(), page_doors()
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        look(process, output_dir, seen)
    assert opened and all(is_within(address, "loopback") for bound in opened.values() for address in bound), opened
    assert not seen.strangers, f"name these in {PAGE.name}, and say who gets in: {seen.strangers}"
    assert set(seen.doors) == set(doors)
    for door, bound in seen.doors.items():
        assert all(is_within(address, doors[door]) for address in bound), (door, bound)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_of_the_machine_gets_no_answer(running: tuple[subprocess.Popen[str], Path]) -> None:
    _, output_dir = running
    addresses = json.loads((output_dir / "access" / "addresses.json").read_text())
    command = [sys.executable, "-c", STRANGER, *addresses.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    answers = Counter(line.split()[0] for line in done.stdout.splitlines())
    assert answers == {"UNAUTHENTICATED": len(addresses), "UNIMPLEMENTED": 2 * len(addresses)}, (
        done.stdout + done.stderr
    )


def test_the_engine_of_a_run_answers_nobody_without_its_key(running: tuple[subprocess.Popen[str], Path]) -> None:
    from slime.types.clients import RolloutClient
    from slime.types.rpc import RpcSettings

    access = running[1] / "access"
    address = json.loads((access / "addresses.json").read_text())["rollout"]
    with RolloutClient(address, settings=RpcSettings(token_file=str(access / "read.token"))) as client:
        (engine,) = client.status().engines
    assert not engine.api_key
    for path, data in (
        ("/server_info", None),
        ("/pause_generation", b"{}"),
        ("/abort_request", b'{"abort_all": true}'),
    ):
        request = urllib.request.Request(engine.url + path, data, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=60)


def test_the_user_of_a_run_finds_tokens_that_nobody_else_can_read(
    running: tuple[subprocess.Popen[str], Path],
) -> None:
    from slime.types.clients import BufferClient
    from slime.types.errors import PermissionDenied
    from slime.types.rpc import RpcSettings

    access = running[1] / "access"
    address = json.loads((access / "addresses.json").read_text())["buffer"]
    assert access.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in access.iterdir()} == {0o600}
    with BufferClient(address, settings=RpcSettings(token_file=str(access / "feed.token"))) as client:
        assert client.stats().next_group_index > 0
        with pytest.raises(PermissionDenied, match="a token for feed may not call /slime.v1.BufferService/OpenRun"):
            client.open_run("mine")
