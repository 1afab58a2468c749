"""Requests whose connection is lost before an answer: those that may be done twice are sent again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.http import EngineHTTP
from slime.types.errors import EngineError

ANSWER = b'{"text": "a", "output_ids": [1], "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "stop"}}}'


class LossyEngine:
    """Loses the connections of its first `lost` requests after `before`, which is all that it answers them with."""

    def __init__(self, lost: int, before: bytes = b"") -> None:
        self.lost = lost
        self.before = before
        self.requests = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
                body = await reader.readexactly(int(length[0].split()[1]) if length else 0)
                self.requests += 1
                if self.requests <= self.lost:
                    writer.write(self.before)
                    break
                event = b'"stream": true' in body
                content = b"data: " + ANSWER + b"\n\n" if event else ANSWER
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving(engine: LossyEngine) -> AsyncIterator[EngineClient]:
    server = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
    try:
        async with EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "e") as client:
            yield client
    finally:
        server.close()


def ask(engine: LossyEngine, call: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        async with serving(engine) as client:
            return await asyncio.wait_for(call(client), 20)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.generate([1, 2]),
        lambda client: client.generate([1, 2], on_output=lambda output: None),
        lambda client: client.abort("r"),
        lambda client: client.pause("retract"),
        lambda client: client.continue_(),
    ],
    ids=["generate", "stream", "abort", "pause", "continue"],
)
def test_a_request_that_is_lost_is_sent_again(call: Callable[[EngineClient], Awaitable[Any]]) -> None:
    engine = LossyEngine(2)
    ask(engine, call)
    assert engine.requests == 3


def test_an_answer_that_is_lost_half_way_is_asked_for_again() -> None:
    engine = LossyEngine(1, before=b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"text"')
    assert ask(engine, lambda client: client.generate([1, 2]))["text"] == "a"


def test_an_engine_that_loses_every_request_is_an_error() -> None:
    engine = LossyEngine(99)
    with pytest.raises(EngineError, match="engine e at .* is gone"):
        ask(engine, lambda client: client.generate([1, 2]))
    assert engine.requests == 3


def test_a_call_that_must_not_be_done_twice_is_sent_once() -> None:
    engine = LossyEngine(1)
    with pytest.raises(EngineError, match="is gone"):
        ask(engine, lambda client: EngineHTTP.post(client, "/update", {}))
    assert engine.requests == 1


def test_a_stream_is_not_begun_anew_after_its_first_tokens() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    event = b"data: " + ANSWER + b"\n\n"
    engine, seen = LossyEngine(1, before=head + b"%x\r\n%s\r\n" % (len(event), event)), []
    with pytest.raises(EngineError, match="is gone"):
        ask(engine, lambda client: client.generate([1, 2], on_output=seen.append))
    assert engine.requests == 1 and len(seen) == 1


def test_a_client_that_is_closed_meanwhile_sends_nothing_again() -> None:
    engine = LossyEngine(1)

    async def close(client: EngineClient) -> None:
        request = asyncio.ensure_future(client.generate([1, 2]))
        while not engine.requests:
            await asyncio.sleep(0)
        await client.close()
        await request

    with pytest.raises(EngineError, match="is gone"):
        ask(engine, close)
    assert engine.requests == 1


def test_a_client_that_is_closed_slowly_sends_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, close = LossyEngine(1), aiohttp.ClientSession.close

    async def close_slowly(client: EngineClient) -> None:
        over = asyncio.Event()

        async def slow(session: aiohttp.ClientSession) -> None:
            await close(session)
            await over.wait()

        monkeypatch.setattr(aiohttp.ClientSession, "close", slow)
        request = asyncio.ensure_future(client.generate([1, 2]))
        while not engine.requests:
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        try:
            await request
        finally:
            over.set()
            await closing

    with pytest.raises(EngineError, match="is gone"):
        ask(engine, close_slowly)
    assert engine.requests == 1
