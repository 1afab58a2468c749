"""A real server in this process, on a port of the system, with a clock that the test moves."""

from __future__ import annotations

import itertools
import json
import secrets
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
    """A clock that stands still until the test moves `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


# Access is tested in packages/types: here, clients that use only grpc need no token.
OPEN = RpcSettings(insecure=True)


STORES = ("sqlite", "postgresql")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "stores(*names): shows a promise of every store; runs with each, or with these")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("stores")
    if "storage" in metafunc.fixturenames and marker is not None:
        metafunc.parametrize("storage", marker.args or STORES, indirect=True)


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
    if request.param == "postgresql and s3":
        new_prefix = request.getfixturevalue("new_prefix")
        return lambda: {"buffer_store": server.new_store(), "buffer_payloads": new_prefix()}
    numbers = itertools.count()
    return lambda: {"buffer_store": server.new_store(), "buffer_dir": str(tmp_path / f"samples{next(numbers)}")}


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Starts an object store; returns its endpoint."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def new_prefix(s3: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Returns a function that returns URLs of empty prefixes of a bucket."""
    import boto3

    values = {
        "AWS_ENDPOINT_URL_S3": s3, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="samples")
    return lambda: f"s3://samples/run-{secrets.token_hex(4)}"


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
