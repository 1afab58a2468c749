"""Embedded engines that somebody else has started join a run and leave it, or die, while it generates."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rollout_tiny_model import write_tiny_model

from slime.rollout import cli
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.streams import StreamedAnswers
from slime.rollout.fleet.member import Member
from slime.rollout.generate.group import generate_batch
from slime.rollout.launch import close_state, open_state
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.clients import RolloutClient
from slime.types.errors import EngineError, InvalidField, NotFound, SlimeError, WrongState
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.v1 import rollout_pb2_grpc

LENGTH = 400
KEY = "the-key-of-all-engines"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


@pytest.fixture(scope="module")
def start(directory: Path) -> Iterator[Callable[[], EngineProcess]]:
    """Starts an engine that is not the run's."""
    with ExitStack() as stack:

        def started() -> EngineProcess:
            options = EmbeddedOptions(model_path=str(directory), threads=1)
            return stack.enter_context(start_embedded(options, api_key=KEY)).wait_ready(120)

        yield started


@pytest.fixture(scope="module")
def two(start: Callable[[], EngineProcess]) -> tuple[EngineProcess, EngineProcess]:
    return start(), start()


class ExternalRun:
    """A rollout service over external engines, and a client of it."""

    def __init__(self, directory: Path, tmp_path: Path, *engines: EngineProcess, **values: Any) -> None:
        (tmp_path / "key").write_text(KEY)
        (tmp_path / "key").chmod(0o600)
        settings = RolloutSettings(
            hf_checkpoint=str(directory), rm_type="exact_partial", rollout_stream_interval=16,
            rollout_external_engine_addrs=[engine.url for engine in engines],
            rollout_engine_api_key_file=str(tmp_path / "key"), **values,
        )  # fmt: skip
        self.directory = directory
        self.state = open_state(settings)
        self.fleet = self.state.fleet
        self.service = RolloutService(settings, self.state, "127.0.0.1:1")
        add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        server = Server([(add, self.service)], RpcSettings(port=0), service_names=["slime.v1.RolloutService"])
        self.server = RunningService(server, lambda: close_state(self.state))
        self.client = RolloutClient(self.server.address)

    def close(self) -> None:
        self.client.close()
        self.server.stop()

    def command(self, *words: str) -> int:
        return cli.main(["engines", *words, "--address", self.server.address])

    def start(self, samples: list[Sample]) -> threading.Thread:
        params = {"max_new_tokens": LENGTH, "ignore_eos": True}
        work = lambda: self.state.loop.run(generate_batch(self.state, samples, params), timeout=120)  # noqa: E731
        thread = threading.Thread(target=work)
        thread.start()
        return thread

    def urls(self) -> list[str]:
        return [engine.url for engine in self.client.status().engines]

    def give(self, member: Any, version: int) -> None:
        self.state.loop.run(member.client.update_weights_from_disk(str(self.directory), version), timeout=120)


@pytest.fixture
def open_run(directory: Path, tmp_path: Path) -> Iterator[Callable[..., ExternalRun]]:
    opened: list[ExternalRun] = []

    def make(*engines: EngineProcess, **values: Any) -> ExternalRun:
        opened.append(ExternalRun(directory, tmp_path, *engines, **values))
        return opened[-1]

    yield make
    for run in opened:
        run.close()


def samples() -> list[Sample]:
    return [Sample(index=i, group_index=0, prompt="12:") for i in range(2)]


def same(one: list[Sample], other: list[Sample]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.tokens, a.response) == (b.tokens, b.response) and a.response_length == LENGTH
        assert np.abs(a.array("rollout_log_probs") - b.array("rollout_log_probs")).max() < 1e-4  # type: ignore[operator]


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set by the first tokens that arrive."""
    event, add = threading.Event(), StreamedAnswers.add

    def heard(answers: StreamedAnswers, piece: Any, engine: str) -> None:
        add(answers, piece, engine)
        if answers.begun:
            event.set()

    monkeypatch.setattr(StreamedAnswers, "add", heard)
    return event


def test_engines_join_and_leave_while_requests_run(
    two: tuple[EngineProcess, EngineProcess],
    open_run: Callable[..., ExternalRun],
    streamed: threading.Event,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = open_run(two[0])
    alone = samples()
    run.start(alone).join(120)
    streamed.clear()
    moved = samples()
    thread = run.start(moved)
    assert streamed.wait(60)
    assert run.command("add", two[1].url.removeprefix("http://")) == 0
    assert capsys.readouterr().out == f"external-1 at {two[1].url} serves\n"
    assert run.state.args.rollout_engine_urls == run.urls() == [engine.url for engine in two]
    assert run.command("remove", two[0].url) == 0
    assert run.urls() == [two[1].url]
    thread.join(120)
    same(moved, alone)
    # It was not stopped, and generates nothing for this run any more.
    assert two[0].poll() is None
    capsys.readouterr()
    assert run.command("list") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "url", "kind", "state", "weights", "in", "flight"]
    assert row.split() == ["external-1", two[1].url, "embedded", "serves", "0", "0"]
    assert run.command("remove", two[1].url) == 1
    assert "is the only one of the run" in capsys.readouterr().err
    # One that has left may join again.
    assert run.client.add_engine(two[0].url).name == "external-2"


def test_an_engine_that_joins_serves_once_it_has_the_weights_of_the_others(
    two: tuple[EngineProcess, EngineProcess], open_run: Callable[..., ExternalRun]
) -> None:
    run = open_run(two[0])
    weights, loop = run.service.engine_weights, run.state.loop
    for member in loop.run(weights.begin(7), timeout=60):
        run.give(member, 7)
    loop.run(weights.commit(7), timeout=60)
    joined = run.client.add_engine(two[1].url)
    assert joined.awaits_weights and joined.first_rank == 1
    old, new = run.fleet.members
    assert run.fleet.router.in_rotation == [old]
    run.start(samples()).join(120)
    assert loop.run(weights.begin_joining(7), timeout=60) == [new]
    run.give(new, 7)
    loop.run(weights.commit(7), timeout=60)
    assert run.fleet.router.in_rotation == [old, new] and not new.awaits_weights
    assert run.client.status().restarts_engines


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGSTOP])
def test_an_external_engine_that_dies_or_hangs_leaves_and_its_requests_go_on(
    start: Callable[[], EngineProcess],
    two: tuple[EngineProcess, EngineProcess],
    open_run: Callable[..., ExternalRun],
    streamed: threading.Event,
    which: signal.Signals,
) -> None:
    lost = start()
    run = open_run(lost, two[1], rollout_health_check_interval=0.2, rollout_health_check_timeout=5.0)
    alone = samples()
    run.start(alone).join(120)
    streamed.clear()
    moved = samples()
    thread = run.start(moved)
    assert streamed.wait(60)
    assert run.fleet.router.load_of(run.fleet.members[0]) == 2
    os.kill(lost.pid, which)
    thread.join(120)
    same(moved, alone)
    assert run.fleet.error is None and run.urls() == [two[1].url]
    assert run.client.status().engine_restarts == 1


def test_engines_that_cannot_join_are_refused(
    two: tuple[EngineProcess, EngineProcess], open_run: Callable[..., ExternalRun]
) -> None:
    run = open_run(two[0])
    for url, error, words in (
        (two[0].url, InvalidField, "does not have yet"),
        ("no address", SlimeError, "url must be"),
        ("127.0.0.1:9", EngineError, "is gone"),
    ):
        with pytest.raises(error, match=words):
            run.client.add_engine(url)
    with pytest.raises(NotFound, match="no engine at http://127.0.0.1:9"):
        run.client.remove_engine("127.0.0.1:9")
    assert run.urls() == [two[0].url]
    run.service._external = None
    with pytest.raises(WrongState, match="has started its engines itself"):
        run.client.add_engine(two[1].url)


def test_the_only_external_engine_that_dies_ends_the_fleet(
    start: Callable[[], EngineProcess], open_run: Callable[..., ExternalRun]
) -> None:
    lost = start()
    run = open_run(lost, rollout_health_check_interval=0.05)
    os.kill(lost.pid, signal.SIGKILL)
    wait_for(lambda: run.fleet.error)
    with pytest.raises(EngineError, match="external-0 failed two health probes"):
        run.state.loop.run(asyncio.wait_for(generate_batch(run.state, samples(), {"max_new_tokens": 1}), 60))


def test_sglang_takes_deltas_only_where_the_run_has_started_it() -> None:
    def carriers(engine: Any) -> tuple[str, ...]:
        return Member(engine, EngineClient(engine.url, engine.name)).delta_carriers

    url = "http://127.0.0.1:5"
    assert carriers(RemoteEngine("external-0", url, "sglang")) == ()
    assert carriers(RemoteEngine("external-0", url, "embedded")) == ("tensor", "disk")
    assert carriers(SimpleNamespace(name="sglang-0", url=url, kind="sglang")) == ("checkpoint", "nccl")
