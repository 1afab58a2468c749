"""Doors of Ray, the one that a run starts and those that it joins."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from slime.launcher.platform.ray_access import (
    AUTH_MODE,
    CHECKED_CALL,
    answers_without_token,
    check_that_ray_asks_for_its_token,
)
from slime.launcher.platform.ray_cluster import ray_cluster
from slime.launcher.platform.ray_processes import few_processes
from slime.types.errors import Unavailable


@pytest.fixture
def open_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that answers Ray's call without a token, to which this process is "connected"."""

    class Answer(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> Any:
            assert details.method == CHECKED_CALL
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Answer()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    monkeypatch.setattr("ray.get_runtime_context", lambda: type("Context", (), {"gcs_address": address}))
    yield address
    server.stop(None)


def test_a_ray_of_this_run_listens_on_the_loopback_and_asks_for_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_MODE, "disabled")
    before = dict(os.environ)
    with ray_cluster(None, num_cpus=1):
        import ray

        ray.get(ray.remote(num_cpus=0)(lambda: None).remote())
        here = psutil.Process()
        listening = []
        for process in [here, *here.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                connections = process.net_connections("inet")
                listening += [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]
        assert len(listening) > 3
        addresses = [ipaddress.ip_address(text.removeprefix("::ffff:")) for text in listening]
        assert all(address.is_loopback for address in addresses), listening
        address = ray.get_runtime_context().gcs_address
        assert not answers_without_token(address)
        # Refused for want of a token, not because Ray has no such call any more.
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(CHECKED_CALL)(b"", timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        from ray._private.worker import _global_node

        session = Path(_global_node.get_session_dir_path())
        assert _global_node.get_temp_dir_path() in map(str, session.parents)
        # Ray's own directories are open to everybody; nobody else gets through the one above.
        closed = session.parents[1]
        assert closed.stat().st_mode & 0o777 == 0o700
    assert not closed.exists()
    assert {name: os.environ.get(name) for name in before if name.startswith("RAY_AUTH")} == {AUTH_MODE: "disabled"}


def test_a_ray_that_takes_work_from_everybody_is_refused(open_ray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AUTH_MODE, raising=False)
    with pytest.raises(Unavailable, match=f"Ray at {open_ray} answers without a token.*RAY_AUTH_MODE=token"):
        check_that_ray_asks_for_its_token()


def test_a_user_may_allow_a_ray_without_a_token(
    open_ray: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(AUTH_MODE, "disabled")
    check_that_ray_asks_for_its_token()
    assert f"Ray at {open_ray} takes work from everybody" in caplog.text


def test_a_port_where_nothing_speaks_is_not_open() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        assert not answers_without_token(f"127.0.0.1:{held.getsockname()[1]}")


def test_the_doctor_names_a_ray_without_a_token(open_ray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.launcher.doctor.cluster import check_ray
    from slime.launcher.doctor.finding import Subject

    monkeypatch.setenv("RAY_ADDRESS", open_ray)
    words = "\n".join(str(finding) for finding in check_ray(Subject()))
    assert f"Ray at {open_ray} answers without a token" in words


def test_a_ray_without_the_private_parts_that_are_left_out_starts_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray._private", None)
    before = dict(os.environ)
    with few_processes():
        pass
    assert dict(os.environ) == before
