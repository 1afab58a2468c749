"""A rollout service that is started again has the external engines that the one before it had last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rollout_tiny_model import write_tiny_model

from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.service import serve
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.clients import RolloutClient
from slime.types.errors import EngineError, InvalidFile
from slime.types.rpc import RpcSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines(model: Path) -> Iterator[list[EngineProcess]]:
    with ExitStack() as stack:
        options = EmbeddedOptions(model_path=str(model), threads=1)
        starting = [stack.enter_context(start_embedded(options)) for _ in range(3)]
        yield [engine.wait_ready(120) for engine in starting]


@contextmanager
def service(model: Path, first: str, file: Path) -> Iterator[RolloutClient]:
    """A service of a run that began with one engine."""
    settings = RolloutSettings(
        hf_checkpoint=str(model), rm_type="exact_partial", rollout_external_engine_addrs=[first],
    )  # fmt: skip
    rpc = RpcSettings(port=0, insecure=True)
    with (
        serve(settings, rpc, buffer_address="127.0.0.1:1", engines_file=str(file)) as running,
        RolloutClient(running.address) as client,
    ):
        yield client


def urls(client: RolloutClient) -> list[str]:
    return [engine.url for engine in client.status().engines]


def test_engines_that_joined_are_known_again_and_those_that_left_are_not(
    model: Path, engines: list[EngineProcess], tmp_path: Path
) -> None:
    (one, two, three), file = engines, tmp_path / "engines.json"
    with service(model, one.url, file) as client:
        client.add_engine(two.url)
        client.add_engine(three.url)
        client.remove_engine(one.url)
    with service(model, one.url, file) as client:
        assert urls(client) == [two.url, three.url]
    # One of them ends while no service runs.
    two.stop(0)
    with service(model, one.url, file) as client:
        assert urls(client) == [three.url]
        assert json.loads(file.read_text()) == [three.url]
    three.stop(0)
    with pytest.raises(EngineError), service(model, one.url, file):
        pass


@pytest.mark.parametrize("text", ["", "[]", "[1]", '{"a": 1}'])
def test_a_file_that_holds_no_engines_is_named(model: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "engines.json").write_text(text)
    with (
        pytest.raises(InvalidFile, match=r"engines\.json does not hold the engines of a run"),
        service(model, "127.0.0.1:1", tmp_path / "engines.json"),
    ):
        pass
