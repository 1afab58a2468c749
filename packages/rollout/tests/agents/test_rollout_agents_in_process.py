"""Agents in the rollout service: `--custom-agent-path`, from the function to samples with rewards."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_agents_fakes import END, Letters, Speaker

from slime.rollout.agents import in_process
from slime.rollout.agents.in_process import InProcessAgent
from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.generate.group import generate_and_rm
from slime.rollout.generate.state import RolloutState
from slime.rollout.metrics import rollout_metrics
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import InvalidSetting
from slime.types.plugin_contracts import CONTRACTS

AGENTS = '''
import time

import anthropic
import openai


async def agent(base_url, sample, api_key, model, sampling_params):
    """Two turns, and a second answer to the first."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": sample.prompt}]
        first = await client.chat.completions.create(model=model, messages=messages)
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        for question in ("and", "or"):
            more = [*messages, {"role": "user", "content": question}]
            await client.chat.completions.create(model=model, messages=more)
    sample.metadata["seen"] = sampling_params["max_new_tokens"]
    return 0.5


async def blocking(base_url, sample):
    """A client that blocks, in an async function."""
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none") as client:
        client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": sample.prompt}])


def plain(base_url, sample, evaluation):
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        client.responses.create(model="m", input=sample.prompt)
    return {"score": 1.0 if evaluation else 0.0}


async def wrong(base_url, sample):
    raise KeyError("city")


async def idle(base_url, sample):
    return 1


def slow(base_url, sample):
    time.sleep(2)


async def text(base_url, sample):
    await blocking(base_url, sample)
    return "good"


def endless(base_url, sample):
    """Never looks at its clock, and takes every error for one of its own."""
    while True:
        try:
            time.sleep(0.001)
        except Exception:
            pass


def stubborn(base_url, sample):
    """Goes on after every error."""
    try:
        plain(base_url, sample, False)
    except openai.OpenAIError:
        pass
    return 1.0


def score(args, sample, **kwargs):
    return float(len(sample.response))
'''

OF_AGENTS = ("acr_timeout", "gateway_log_level")


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    engine = Speaker()
    yield engine
    engine.stop()


@pytest.fixture
def play(speaker: Speaker, make_state: Callable[..., RolloutState], tmp_path: Path) -> Callable[..., list[Sample]]:
    (tmp_path / "agents.py").write_text(AGENTS)

    def run(name: str, *, evaluation: bool = False, **values: Any) -> list[Sample]:
        score = f"{tmp_path}/agents.py:score"
        values = {
            "custom_agent_path": f"{tmp_path}/agents.py:{name}",
            "custom_rm_path": score,
            "rm_type": None,
        } | values
        settings = {key: value for key, value in values.items() if key not in OF_AGENTS}
        state = make_state(speaker, rollout_max_response_len=50, **settings)
        for name in OF_AGENTS:
            setattr(state.args, name, values.get(name))
        state.tokenizer, state.context_len, state.stop_texts = Letters(), 2000, {END: "<|im_end|>"}
        sample = Sample(index=3, group_index=1, prompt="hi", metadata={})
        generated = state.loop.run(
            generate_and_rm(state.args, sample, dict(state.sampling_params), evaluation), timeout=120
        )
        return generated if isinstance(generated, list) else [generated]

    return run


def test_an_agents_turns_are_samples_with_its_reward(speaker: Speaker, play: Callable[..., list[Sample]]) -> None:
    speaker.lines = ["one", "two", "three"]
    first, second = play("agent")
    assert first.response.startswith("one<|im_end|>") and first.response.endswith("two")
    assert second.response == "three" and second.prompt == "hi"
    assert [sample.reward for sample in (first, second)] == [0.5, 0.5]
    assert first.effective_response_length == len("one") + len("two") + 2 and set(second.loss_mask) == {1}
    assert {sample.rollout_id for sample in (first, second)} == {3} and first.metadata["seen"] == 50
    metrics = rollout_metrics([[first, second]], RolloutSettings(hf_checkpoint="none"))
    assert metrics["rollout/agents/branches"] == 1 and metrics["rollout/agents/drifted_turns"] == 0
    assert metrics["rollout/agents/turns"] == 3


def test_an_agent_may_block_and_leave_the_reward_to_the_run(
    speaker: Speaker, play: Callable[..., list[Sample]]
) -> None:
    speaker.lines = ["four", "x"]
    (sample,) = play("blocking")
    assert sample.response == "four" and sample.reward == 4.0
    (sample,) = play("plain", evaluation=True, reward_key="score")
    assert sample.reward == {"score": 1.0} and sample.status is Sample.Status.COMPLETED


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong", "the agent raised KeyError: 'city'"),
        ("idle", "the agent made no request to the model"),
        ("slow", "no result in 0.2 s"),
        ("text", "reward: got good, expected a finite number"),
    ],
)
def test_an_agent_that_fails_costs_its_sample_alone(
    speaker: Speaker, play: Callable[..., list[Sample]], name: str, reason: str
) -> None:
    speaker.lines = ["x"]
    started = time.monotonic()
    (sample,) = play(name, acr_timeout=0.2 if name == "slow" else None)
    assert sample.status is Sample.Status.FAILED and sample.remove_sample and sample.reward is None
    assert reason in sample.metadata["episode_error"]
    assert name != "slow" or time.monotonic() - started < 60


def agent_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slime-agent"]


def test_an_agent_that_goes_on_after_its_time_is_interrupted(
    play: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_process, "END_SECONDS", 0.05)
    (sample,) = play("endless", acr_timeout=0.2)
    assert sample.metadata["episode_error"] == "no result in 0.2 s"
    for thread in agent_threads():
        thread.join(20)
    assert not agent_threads()


def test_agents_that_nothing_interrupts_end_the_run_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "END_SECONDS", 0.01)
    monkeypatch.setattr(in_process, "MOST_HANGING", 2)
    begun, over = threading.Semaphore(0), threading.Event()

    async def main() -> None:
        agent = InProcessAgent(lambda base_url, sample: begun.release() or over.wait(60))
        for _ in range(2):
            playing = asyncio.ensure_future(agent.play("", Sample(index=1), {}))
            await asyncio.to_thread(begun.acquire)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
        while len(in_process._hanging) < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidSetting, match="--custom-agent-path: 2 episodes were ended"):
            await agent.play("", Sample(index=1), {})
        over.set()
        for thread in agent_threads():
            await asyncio.to_thread(thread.join, 20)
        # Threads that have ended after all do not count.
        assert await agent.play("", Sample(index=1), {}) == 1.0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_the_key_of_a_reward_is_that_of_the_call(speaker: Speaker, play: Callable[..., list[Sample]]) -> None:
    speaker.lines = ["x"] * 4
    keys = {"reward_key": "score", "eval_reward_key": "solved"}
    (sample,) = play("agent", evaluation=True, **keys)[:1]
    assert sample.reward == {"solved": 0.5}
    (sample,) = play("plain")
    assert sample.status is Sample.Status.FAILED and "a dict requires --reward-key" in sample.metadata["episode_error"]


@pytest.mark.parametrize("name", ["plain", "stubborn"])
def test_an_episode_that_is_aborted_is_begun_anew_later(
    speaker: Speaker, play: Callable[..., list[Sample]], name: str
) -> None:
    speaker.lines = ["late"] * 3
    prompt = Letters().encode(Letters().apply_chat_template([{"role": "user", "content": "hi"}]))
    speaker.held_prompts.add(tuple(prompt))
    assert speaker._abort is not None
    speaker._loop.call_soon_threadsafe(speaker._abort.set)
    (sample,) = play(name)
    assert sample.status is Sample.Status.ABORTED and not sample.response_length and sample.reward is None
    assert len(speaker.requests) == 1, "a client that tries again is refused"


def test_the_requests_of_an_agent_are_those_of_its_call(
    speaker: Speaker, play: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iteration that has enough groups aborts the open requests of its call."""
    call, seen, answered = RolloutCall(0, 1), [], Speaker._output

    def look(engine: Speaker, *given: Any, aborted: bool) -> dict[str, Any]:
        seen.append(len(call.open_requests))
        return answered(engine, *given, aborted)

    monkeypatch.setattr(Speaker, "_output", look)
    speaker.lines = ["x"]
    before = CALL.set(call)
    try:
        play("blocking")
    finally:
        CALL.reset(before)
    assert seen == [1] and not call.open_requests


def test_an_agent_is_checked_before_anything_starts() -> None:
    contract = CONTRACTS["--custom-agent-path"]

    async def agent(base_url: str, sample: Sample) -> None:
        await asyncio.sleep(0)

    def other(sample: Sample) -> None:
        return None

    assert contract.fits(agent) and not contract.fits(other)
    with pytest.raises(InvalidSetting, match="--custom-agent-path a:b and --custom-generate-function-path c:d"):
        RolloutSettings(hf_checkpoint="none", custom_agent_path="a:b", custom_generate_function_path="c:d").validate()


def test_an_episode_that_is_cancelled_as_it_begins_does_not_run() -> None:
    ran, over = threading.Event(), threading.Event()

    async def agent(base_url: str, sample: Sample) -> None:
        await asyncio.sleep(0)
        ran.set()

    def run_late(work: Callable[[], None]) -> None:
        over.wait(10)
        work()

    async def main(started: list[threading.Thread]) -> None:
        thread = threading.Thread

        def make(target: Callable[[], None], **options: Any) -> threading.Thread:
            started.append(thread(target=run_late, args=(target,), **options))
            return started[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "Thread", make)
            task = asyncio.ensure_future(InProcessAgent(agent).play("", Sample(index=1), {}))
            while not started:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        over.set()

    threads: list[threading.Thread] = []
    asyncio.run(main(threads))
    threads[0].join(10)
    assert not threads[0].is_alive() and not ran.is_set()


def test_the_endpoint_logs_what_it_is_told_to(speaker: Speaker, play: Callable[..., list[Sample]]) -> None:
    log = logging.getLogger("slime.rollout.agents")
    before = log.level
    speaker.lines = ["x"]
    try:
        play("blocking", gateway_log_level="error")
        assert log.level == logging.ERROR
    finally:
        log.setLevel(before)
