"""Requests of an embedded engine that is killed: they go on at another one with the tokens that it had streamed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_tiny_model import write_tiny_model

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.streams import StreamedAnswers
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.generate.group import generate_batch
from slime.rollout.generate.state import RolloutState, flat_args, fleet_options
from slime.rollout.plugins import RolloutPlugins
from slime.rollout.prompts.tokenizer import load_tokenizer
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample

LENGTH = 400
INTERVAL = 16
PROMPTS = ("12:", "abc:", "7 and 8:")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


class Rollouts:
    """Two embedded engines, and what the fleet sent to each and got from it."""

    def __init__(self, directory: Path, **values: Any) -> None:
        settings = RolloutSettings(hf_checkpoint=str(directory), rm_type="exact_partial", **values)
        options = EmbeddedOptions(model_path=str(directory), threads=1, deterministic=settings.deterministic)
        processes = [start_embedded(options, name=f"embedded-{i}") for i in range(2)]
        self.loop = LoopThread()
        self.fleet = Fleet([process.wait_ready(120) for process in processes], self.loop, fleet_options(settings))
        self.fleet.start()
        plugins = RolloutPlugins(settings)
        self.state = RolloutState(flat_args(settings, self.fleet), self.fleet, load_tokenizer(str(directory)), plugins)

    def samples(self) -> list[Sample]:
        return [Sample(index=i, group_index=i // 2, prompt=PROMPTS[i // 2]) for i in range(2 * len(PROMPTS))]

    def start(self, samples: list[Sample], **params: Any) -> threading.Thread:
        """Generates each group with a request of its own, as a rollout does."""
        params = {"max_new_tokens": LENGTH, "ignore_eos": True} | params

        async def generate() -> None:
            size = len(samples) if self.state.args.deterministic else 2
            parts = [samples[i : i + size] for i in range(0, len(samples), size)]
            await asyncio.gather(*(generate_batch(self.state, part, params) for part in parts))

        thread = threading.Thread(target=lambda: self.loop.run(generate(), timeout=120))
        thread.start()
        return thread

    def generated(self, **params: Any) -> list[Sample]:
        samples = self.samples()
        self.start(samples, **params).join(120)
        return samples

    def kill(self, name: str) -> None:
        (member,) = (member for member in self.fleet.members if member.name == name)
        os.kill(member.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]


def opened(directory: Path, **values: Any) -> Iterator[Rollouts]:
    rollouts = Rollouts(directory, **values)
    yield rollouts
    rollouts.fleet.stop(0)
    rollouts.loop.stop()


@pytest.fixture(scope="module")
def engines(directory: Path) -> Iterator[Rollouts]:
    yield from opened(directory, rollout_stream_interval=INTERVAL, rollout_top_p=0.9)


@pytest.fixture
def rollouts(engines: Rollouts) -> Rollouts:
    """Both engines, of which an earlier test may have killed one."""
    wait_for(lambda: len(engines.fleet.router.in_rotation) == 2)
    return engines


@pytest.fixture
def deterministic(directory: Path) -> Iterator[Rollouts]:
    yield from opened(directory, deterministic=True)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Watched:
    """Notes the prompts that go to the engines, and from which engine each piece of a stream comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: list[tuple[str, list[list[int]]]] = []
        self.pieces: list[str] = []
        self.streamed = threading.Event()
        generate, add = EngineClient.generate, StreamedAnswers.add

        async def noted(client: EngineClient, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            self.prompts.append((client.name, input_ids))
            return await generate(client, input_ids, *args, **kwargs)

        def heard(answers: StreamedAnswers, piece: Any, engine: str) -> None:
            add(answers, piece, engine)
            self.pieces.append(engine)
            if answers.begun:
                self.streamed.set()

        monkeypatch.setattr(EngineClient, "generate", noted)
        monkeypatch.setattr(StreamedAnswers, "add", heard)


def same(one: list[Sample], other: list[Sample], tolerance: float) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.tokens, a.response, a.status) == (b.tokens, b.response, b.status)
        difference = np.abs(a.array("rollout_log_probs") - b.array("rollout_log_probs"))  # type: ignore[operator]
        assert difference.max() <= tolerance
        assert [(span.start, span.end, span.weight_version) for span in a.spans] == [
            (span.start, span.end, span.weight_version) for span in b.spans
        ]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}], ids=["plain", "nuclei"])
def test_requests_of_a_killed_engine_go_on_elsewhere_with_the_tokens_that_they_had(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    alone = rollouts.generated(**params)
    watched = Watched(monkeypatch)
    samples = rollouts.samples()
    thread = rollouts.start(samples, **params)
    assert watched.streamed.wait(60)
    rollouts.kill(watched.pieces[0])
    thread.join(120)
    assert not thread.is_alive()
    same(samples, alone, 1e-4)
    for sample, other in zip(samples, alone, strict=True):
        assert bool(params) == (sample.rollout_top_p_token_ids is not None)
        assert sample.rollout_top_p_token_ids == other.rollout_top_p_token_ids
        assert sample.rollout_top_p_token_offsets == other.rollout_top_p_token_offsets
    # The requests after the first ones bring prompts together with tokens of responses.
    begun = [len(prompts[0]) for _, prompts in watched.prompts[: len(PROMPTS)]]
    again = [prompt for _, prompts in watched.prompts[len(PROMPTS) :] for prompt in prompts]
    kept = []
    for prompt in again:
        sample = next(sample for sample in samples if sample.tokens[: len(prompt)] == prompt)
        kept.append(len(prompt) - begun[sample.group_index or 0])
    assert len(kept) in (2, 4) and max(kept) > 0 and all(count % INTERVAL == 0 for count in kept)


def test_stop_strings_and_limits_are_those_of_a_request_that_was_left_alone(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some 200 tokens on, in the middle of what an engine generates.
    stops = [sample.response[200:203] for sample in rollouts.generated()]
    params = {"stop": stops, "min_new_tokens": 30, "ignore_eos": False, "no_stop_trim": True}
    alone = rollouts.generated(**params)
    watched = Watched(monkeypatch)
    samples = rollouts.samples()
    thread = rollouts.start(samples, **params)
    assert watched.streamed.wait(60)
    rollouts.kill(watched.pieces[0])
    thread.join(120)
    same(samples, alone, 1e-4)


def test_with_deterministic_a_lost_request_is_repeated_bit_for_bit(
    deterministic: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = deterministic
    alone = rollouts.generated()
    watched = Watched(monkeypatch)
    samples = rollouts.samples()
    thread = rollouts.start(samples)
    wait_for(lambda: rollouts.loop.run(rollouts.fleet.members[0].client.server_info())["num_running"])
    rollouts.kill("embedded-0")
    thread.join(120)
    assert rollouts.fleet.num_restarts == 1 and not watched.pieces
    same(samples, alone, 0.0)
    assert len(watched.prompts) == 3 and watched.prompts[2] == watched.prompts[0]
