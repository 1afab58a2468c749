"""Environments of verifiers 0.4 as agents, against the package where it is installed."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollout_agents_fakes import END, Letters, Speaker

from slime.rollout.adapters.verifiers import episodes, prompts
from slime.rollout.generate.group import generate_and_rm
from slime.rollout.generate.state import RolloutState
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable

# As an author of environments writes them: nothing here is of slime but the last lines.
ENVIRONMENT = '''
import itertools

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return 2.0 * (trace.last_reply == self.data.answer)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    pass


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    INFINITE = True

    def load(self):
        for a in itertools.count():
            yield SumTask(SumData(prompt=f"{a} + 1?", answer=str(a + 1)), self.config.task)


class SumEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class SumEnv(vf.Env[SumEnvConfig]):
    """Asks again, up to three times."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply == task.data.answer:
                    break
                segment = await interaction.turn("Again.")


class TwoConfig(SumEnvConfig):
    judge: vf.AgentConfig = vf.AgentConfig()


class Two(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        await agents.player.run(task)


__all__ = ["SumTaskset", "SumEnv"]


def make():
    seat = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    return load_environment(resolve_env_config({"taskset": {"id": "environment-of-test"}, "player": seat}))


def make_two():
    return Two(TwoConfig(taskset={"id": "environment-of-test"}))
'''


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package verifiers is not installed")
    if [int(part) for part in version.split(".")[:2]] < [0, 4]:
        pytest.skip(f"verifiers {version} is older than 0.4")
    (tmp_path / "environment_of_test.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("environment_of_test")
    sys.modules.pop("environment_of_test")


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    engine = Speaker()
    yield engine
    engine.stop()


def test_several_turns_are_one_sample_with_the_environments_turns_masked(
    environment: Any, speaker: Speaker, make_state: Callable[..., RolloutState], tmp_path: Path
) -> None:
    environment.play = episodes(environment.make)
    prompts(environment.make, tmp_path / "prompts.jsonl", count=2)
    data = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[1])
    assert data["input"] == "1 + 1?" and data["label"] == "2"
    path = "environment_of_test.play"
    state = make_state(speaker, rollout_max_response_len=200, custom_agent_path=path, rm_type=None)
    state.tokenizer, state.context_len, state.stop_texts = Letters(), 2000, {END: "<|im_end|>"}
    speaker.lines = ["5", "6", "2"]
    sample = Sample(index=3, group_index=1, prompt=data["input"], label=data["label"], metadata=data["metadata"])
    sample = state.loop.run(generate_and_rm(state.args, sample, dict(state.sampling_params)), timeout=240)
    assert sample.reward == 2.0 and sample.metadata["verifiers_metrics"]["letters"] == 1.0
    tokens = sample.tokens[-sample.response_length :]
    trained = Letters().decode([token for token, mask in zip(tokens, sample.loss_mask, strict=True) if mask])
    assert trained == "5<|im_end|>6<|im_end|>2<|im_end|>" and "Again." in sample.response


def test_what_cannot_work_is_refused(environment: Any, tmp_path: Path) -> None:
    with pytest.raises(
        NotAvailable, match="the environment Two is not supported yet: it has several agents: player, j"
    ):
        episodes(environment.make_two)
    with pytest.raises(InvalidSetting, match="count is required: the task set SumTaskset has no end"):
        prompts(environment.make, tmp_path / "prompts.jsonl")
    with pytest.raises(InvalidSetting, match="evaluation=True and a vf.Env cannot be used together"):
        prompts(environment.make, tmp_path / "prompts.jsonl", count=1, evaluation=True)
    agent = episodes(environment.make)
    other = Sample(prompt="x", metadata={"verifiers": {"idx": 1, "key": "of another task"}})
    with pytest.raises(InvalidField, match="a task of this environment: write its prompts again"):
        asyncio.run(agent("http://127.0.0.1:9/v1", other, "", "m"))
