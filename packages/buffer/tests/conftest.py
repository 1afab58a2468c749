"""A real server in this process, on a port of the system, with a clock that the test moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slime.buffer.buffer import Buffer
from slime.buffer.service import RunningBuffer, serve_buffer
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


# Doors are tested where they are made: clients of grpc alone get in here without a token.
OPEN = RpcSettings(insecure=True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[Any], name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def serving(clock: Clock) -> Iterator[Callable[..., RunningBuffer]]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:

        def start(**settings: Any) -> RunningBuffer:
            return stack.enter_context(serve_buffer(Buffer(BufferSettings(**settings), clock=clock), OPEN))

        yield start


@pytest.fixture
def connected(serving: Callable[..., RunningBuffer]) -> Iterator[Callable[..., BufferClient]]:
    """Starts a buffer with the given settings, opens a run, and returns a client that writes."""
    with ExitStack() as stack:

        def connect(**settings: Any) -> BufferClient:
            client = stack.enter_context(BufferClient(serving(**settings).address))
            client.open_run("run")
            return client

        yield connect
