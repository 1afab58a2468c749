"""Guards of the HTTP servers, over sockets: slow heads and bodies, many connections, hosts, origins, keys."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from slime.rollout.doors import Access, Bodies, Connections, Workers, check_exposure, connections, listen
from slime.types.errors import DeadlineExceeded, InvalidField, InvalidSetting, SlimeError, Unauthenticated

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Answers POST / with the number of bytes that it read. busy: requests that wait for `release`."""

    def __init__(self, access: Access, bodies: Bodies, guard: Connections) -> None:
        self.access, self.bodies, self.guard = access, bodies, guard
        self.release = asyncio.Event()
        self.errors: list[SlimeError] = []

    async def answer(self, request: web.Request) -> web.Response:
        try:
            self.access.check(request)
            body = await self.bodies.read(request)
        except SlimeError as error:
            self.errors.append(error)
            return web.Response(status=getattr(error, "http_status", 401), text=error.message)
        if request.path == "/wait":
            await self.release.wait()
        return web.Response(text=str(len(body)))


@contextlib.asynccontextmanager
async def serving(
    access: Access | None = None, bodies: Bodies | None = None, guard: Connections | None = None
) -> AsyncIterator[tuple[Server, int]]:
    server = Server(access or Access("127.0.0.1"), bodies or Bodies(), guard or Connections())
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", server.answer)
    listener = listen("127.0.0.1", 0)
    runner = server.guard.runner(application)
    await runner.setup()
    await server.guard.serve(runner, listener)
    try:
        yield server, listener.getsockname()[1]
    finally:
        server.release.set()
        await runner.cleanup()


def head(path: str = "/", method: str = "POST", **headers: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in ({"Host": "127.0.0.1"} | headers).items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def ask(port: int, *parts: bytes) -> tuple[int, str]:
    """Status and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
    status, body = await answer(reader)
    writer.close()
    return status, body


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    first, *lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines if line)
    return int(first.split()[1]), (await reader.readexactly(int(headers["content-length"]))).decode()


def body(content: bytes, path: str = "/", **headers: Any) -> bytes:
    return head(path, Content_Length=len(content), **{"Content_Type": "application/json"} | headers) + content


def test_a_head_that_trickles_is_dropped_and_others_are_served() -> None:
    async def scenario() -> None:
        async with serving(guard=Connections(head_seconds=0.2)) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)

            async def trickle() -> None:
                for byte in head()[:-2] + b"X-More: " + b"x" * 10_000:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.02)

            task = asyncio.create_task(trickle())
            silent, _ = await asyncio.open_connection("127.0.0.1", port)
            assert await ask(port, body(b"12")) == (200, "2")
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(silent.read(), 10) == b""
            task.cancel()
            assert not server.guard.open and not server.guard.waiting

    asyncio.run(scenario())


def test_a_server_that_is_starved_drops_no_request() -> None:
    """Each turn of its loop takes longer than the deadline of a head."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        is_over = False

        def hold_up() -> None:
            time.sleep(0.05)
            if not is_over:
                loop.call_soon(hold_up)

        async with serving(guard=Connections(head_seconds=0.04)) as (_, port):
            hold_up()
            try:
                assert await asyncio.gather(*(ask(port, body(b"12")) for _ in range(5))) == [(200, "2")] * 5
            finally:
                is_over = True

    asyncio.run(scenario())


def test_a_long_request_outlives_the_deadline_of_its_head() -> None:
    async def scenario() -> None:
        async with serving(guard=Connections(head_seconds=0.1)) as (server, port):
            waiting = asyncio.create_task(ask(port, body(b"123", "/wait")))
            await asyncio.sleep(0.4)
            server.release.set()
            assert await waiting == (200, "3")

    asyncio.run(scenario())


class ForeignTransport:
    """A transport of no class of asyncio, as those of uvloop."""

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def test_the_transports_of_another_event_loop_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    made = connections._Connection.connection_made
    monkeypatch.setattr(
        connections._Connection, "connection_made", lambda self, transport: made(self, ForeignTransport(transport))
    )

    async def scenario() -> None:
        async with serving(guard=Connections(most=16, head_seconds=0.2)) as (server, port):
            assert await ask(port, body(b"12")) == (200, "2")
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            assert await asyncio.wait_for(reader.read(), 20) == b"" and not server.guard.open

    asyncio.run(scenario())


def test_uvloop_serves_them_too() -> None:
    """Ray takes uvloop for its actors where it is installed."""
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")

    async def scenario() -> None:
        async with serving() as (_, port):
            assert await asyncio.gather(*(ask(port, body(b"12")) for _ in range(5))) == [(200, "2")] * 5

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_above_the_most_connections_one_without_a_request_is_dropped() -> None:
    async def scenario() -> None:
        async with serving(guard=Connections(most=20, head_seconds=60)) as (server, port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(60)]
            assert await ask(port, body(b"12")) == (200, "2")
            assert len(server.guard.open) <= 20
            busy = [asyncio.create_task(ask(port, body(b"1", "/wait"))) for _ in range(20)]
            while len(server.guard.open) < 20 or server.guard.waiting:
                await asyncio.sleep(0.01)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await ask(port, body(b"12"))
            server.release.set()
            assert await asyncio.gather(*busy) == [(200, "1")] * 20
            for _, writer in idle:
                writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("framing", [{"Content_Length": 5000}, {"Transfer_Encoding": "chunked"}])
def test_a_body_is_read_within_its_limits(framing: dict[str, Any]) -> None:
    async def scenario() -> None:
        bodies = Bodies(max_bytes=1000, seconds=0.3, together=1500)
        async with serving(bodies=bodies) as (server, port):
            assert await ask(port, body(b"x" * 1000)) == (200, "1000")
            opening = head(Content_Type="application/json", **framing)
            chunk = b"5dc\r\n" + b"x" * 1500 + b"\r\n" if "Transfer_Encoding" in framing else b"x" * 1500
            status, text = await ask(port, opening, chunk)
            assert status == 413 and "at most 1000 bytes" in text
            late = head(Content_Type="application/json", Content_Length=900) + b"x" * 800
            (status, text), other = await asyncio.gather(ask(port, late), ask(port, late))
            assert {status, other[0]} <= {408, 503} and 408 in (status, other[0])
            assert await ask(port, body(b"x" * 1000)) == (200, "1000"), "what was being read no longer counts"

    asyncio.run(scenario())


def test_a_body_that_comes_steadily_or_to_a_starved_reader_is_read_to_its_end() -> None:
    async def scenario() -> None:
        bodies = Bodies(seconds=0.3)
        async with serving(bodies=bodies) as (_, port):
            pieces = [b"x" * 2**16] * 10
            for starved in (False, True):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head(Content_Type="application/json", Content_Length=10 * 2**16))
                for piece in pieces[:-1]:
                    writer.write(piece)
                    # In all, three times the seconds.
                    await asyncio.sleep(0 if starved else 0.1)
                if starved:
                    await asyncio.sleep(0.05)
                    # Nothing runs in this process, the reader included.
                    time.sleep(0.6)
                writer.write(pieces[-1])
                assert await answer(reader) == (200, str(10 * 2**16))
                writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:5"}, 200),
        ({"Host": "tunnel.example"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[oops"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1"}, 200),
        ({"Origin": "https://tunnel.example", "Host": "tunnel.example"}, 200),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": "application/json; charset=utf-8"}, 200),
        ({"Content_Encoding": "deflate"}, 415),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer \xff"}, 401),
        ({"Authorization": ""}, 401),
    ],
)
def test_who_may_call_with_what(headers: dict[str, str], status: int) -> None:
    async def scenario() -> None:
        access = Access("127.0.0.1", api_key="right", names=["Tunnel.example"])
        async with serving(access=access) as (server, port):
            found, text = await ask(port, body(b"{}", **{"Authorization": "Bearer right"} | headers))
            assert found == status, text
            if status == 401:
                assert isinstance(server.errors[0], Unauthenticated) and "right" not in text

    asyncio.run(scenario())


def test_probes_need_no_key_and_a_body_has_a_type() -> None:
    async def scenario() -> None:
        access = Access("127.0.0.1", api_key="right", content_types={"/bytes": "application/octet-stream"})
        async with serving(access=access) as (_, port):
            assert (await ask(port, head("/health", "GET")))[0] == 200
            assert (await ask(port, head("/healthy", "GET")))[0] == 401
            key = {"Authorization": "Bearer right"}
            assert (await ask(port, head(Content_Length=0, **key)))[0] == 200
            assert (await ask(port, head(Content_Length=2, **key) + b"{}"))[0] == 415
            assert (await ask(port, body(b"{}", "/bytes", **key)))[0] == 415
            assert (await ask(port, body(b"ab", "/bytes", Content_Type="application/octet-stream", **key)))[0] == 200

    asyncio.run(scenario())


def test_beyond_the_loopback_there_is_a_key() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        check_exposure(host, None, "--host", "--api-key-file")
    check_exposure("0.0.0.0", "key", "--host", "--api-key-file")
    for host in ("0.0.0.0", "::", "10.0.0.1", "node7"):
        with pytest.raises(InvalidSetting, match=f"--host {host} requires --api-key-file"):
            check_exposure(host, None, "--host", "--api-key-file")


def test_work_that_takes_too_long_is_given_up() -> None:
    async def scenario() -> None:
        workers, held = Workers("test", threads=1, seconds=0.1), asyncio.Event()
        loop = asyncio.get_running_loop()
        with pytest.raises(DeadlineExceeded, match="the prompt took longer than 0.1 s"):
            await workers.run("the prompt", lambda: asyncio.run_coroutine_threadsafe(held.wait(), loop).result())
        held.set()
        workers.seconds = 20
        assert await workers.run("the prompt", lambda: 7) == 7
        workers.close()

    asyncio.run(scenario())


def test_json_that_nests_without_end_is_refused() -> None:
    from slime.rollout.doors import parse_json

    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    for raw in (b"[" * 100_000, b'{"a":' * 100_000, b"{", b"\xff\xfe\x00", b"9" * 5000):
        with pytest.raises(InvalidField, match="body: got .*, expected JSON"):
            parse_json(raw)


def test_a_port_in_use_is_an_oserror() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError):
            listen("127.0.0.1", taken.getsockname()[1])
