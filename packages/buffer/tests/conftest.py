"""A real server in this process, on a port of the system, with a clock that the test moves."""

from __future__ import annotations

import itertools
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


STORES = ("sqlite", "postgresql")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stores: the test shows a promise of every store, and runs with each")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "storage" in metafunc.fixturenames and metafunc.definition.get_closest_marker("stores"):
        metafunc.parametrize("storage", STORES, indirect=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    import postgres_server

    if reason := postgres_server.missing():
        pytest.skip(reason)
    with postgres_server.postgres_server() as server:
        yield server


@pytest.fixture
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], dict[str, str]]:
    """Returns the settings of a new, empty storage."""
    if getattr(request, "param", "sqlite") == "sqlite":
        return lambda: {}
    server = request.getfixturevalue("postgres")
    numbers = itertools.count()
    return lambda: {"buffer_store": server.new_store(), "buffer_dir": str(tmp_path / f"samples{next(numbers)}")}


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
def serving(clock: Clock, storage: Callable[[], dict[str, str]]) -> Iterator[Callable[..., RunningBuffer]]:
    """Starts servers that end with the test."""
    with ExitStack() as stack:

        def start(**settings: Any) -> RunningBuffer:
            return stack.enter_context(serve_buffer(Buffer(BufferSettings(**storage() | settings), clock=clock), OPEN))

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
