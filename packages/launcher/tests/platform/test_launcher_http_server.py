"""Connections that other users of the machine hold open take neither the launcher's threads nor the user's page."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from launcher_run_files import make_run

from slime.launcher.metrics import prometheus
from slime.launcher.platform.http_server import LimitedServer
from slime.launcher.show import server as page_server
from slime.launcher.show.answers import Answers
from slime.launcher.show.command import serve
from slime.launcher.show.run_files import RunFiles

MOST = 4


@pytest.fixture(params=["page", "metrics"])
def door(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, str]]:
    """Yields the port of a server and a path that it answers."""
    monkeypatch.setattr(LimitedServer, "most", MOST)
    # Idle connections end after a while in any case.
    for module in (page_server, prometheus):
        monkeypatch.setattr(module._Handler, "timeout", 600.0)
    if request.param == "metrics":
        exporter = prometheus.PrometheusServer("127.0.0.1", 0, num_steps=lambda: 1)
        yield int(exporter.address.rpartition(":")[2]), "/health"
        exporter.close(failed=False)
    else:
        server = serve(Answers([RunFiles(make_run(tmp_path / "run"))]))
        yield server.server_port, f"/{server.word}/"
        server.shutdown()
        server.server_close()


def is_dropped(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_are_limited_and_keep_nobody_out(
    door: tuple[int, str], capfd: pytest.CaptureFixture[str]
) -> None:
    port, path = door
    with ExitStack() as held:
        clients = []
        for _ in range(5 * MOST):
            clients.append(held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)))
            clients[-1].sendall(b"GET / HTTP/1.1\r\nHost: ")
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            connection.request("GET", path)
            assert connection.getresponse().status in (200, 503)
        assert all(map(is_dropped, clients[: 4 * MOST]))
    assert "Traceback" not in capfd.readouterr().err
