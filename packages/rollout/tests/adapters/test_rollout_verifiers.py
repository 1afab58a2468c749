"""Environments of verifiers as agents, against the package where it is installed."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_agents_fakes import END, Letters, Speaker

from slime.rollout.adapters.verifiers import episodes, prompts
from slime.rollout.generate.group import generate_and_rm
from slime.rollout.generate.state import RolloutState
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable

# As an author of environments writes them: nothing here is of slime but the last lines.
ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset

DATA = Dataset.from_list([
    {"question": "2 + 2?", "answer": "4", "info": {"level": 1}},
    {"question": "3 + 4?", "answer": "7", "info": {"level": 2}},
])


def right(completion, answer, info):
    return float(completion[-1]["content"] == answer) * info["level"]


def turns(state):
    return float(len(state["trajectory"]))


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Again(vf.MultiTurnEnv):
    """Asks again until the answer is right."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "Again."}]

    @vf.stop
    async def is_right(self, state, **kwargs):
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"] == state["answer"]


def rubric():
    return vf.Rubric(funcs=[right, turns], weights=[1.0, 0.0])


def single():
    return vf.SingleTurnEnv(
        dataset=DATA, eval_dataset=DATA.select([1]), system_prompt="Be brief.", rubric=rubric()
    )


def again():
    return Again(dataset=DATA, rubric=rubric(), max_turns=3)


def tools():
    return vf.ToolEnv(dataset=DATA, tools=[add], rubric=rubric(), max_turns=3)


from slime.rollout.adapters.verifiers import episodes

play_single, play_again, play_tools = episodes(single), episodes(again), episodes(tools)
'''


@pytest.fixture
def speaker() -> Iterator[Speaker]:
    engine = Speaker()
    yield engine
    engine.stop()


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    vf = pytest.importorskip("verifiers", reason="the package verifiers is not installed")
    if not hasattr(vf, "SingleTurnEnv"):
        pytest.skip("verifiers 0.4 has no vf.Environment")
    before = signal.getsignal(signal.SIGINT)
    (tmp_path / "environments_of_test.py").write_text(ENVIRONMENTS)
    monkeypatch.syspath_prepend(tmp_path)
    # Runs load plug-ins in a thread.
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(importlib.import_module, "environments_of_test").result()
    sys.modules.pop("environments_of_test")
    assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C is the run's"


@pytest.fixture
def play(
    speaker: Speaker, make_state: Callable[..., RolloutState], environments: Any, tmp_path: Path
) -> Callable[..., list[Sample]]:
    def run(name: str, row: int = 0, tool_calls: str | None = None) -> list[Sample]:
        prompts(getattr(environments, name), tmp_path / "prompts.jsonl")
        data = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[row])
        path = f"environments_of_test.play_{name}"
        state = make_state(speaker, rollout_max_response_len=200, custom_agent_path=path, rm_type=None)
        state.args.sglang_tool_call_parser = tool_calls
        state.tokenizer, state.context_len, state.stop_texts = Letters(), 2000, {END: "<|im_end|>"}
        sample = Sample(index=3, group_index=1, prompt=data["input"], label=data["label"], metadata=data["metadata"])
        generated = state.loop.run(generate_and_rm(state.args, sample, dict(state.sampling_params)), timeout=120)
        return generated if isinstance(generated, list) else [generated]

    return run


def first_prompt(speaker: Speaker) -> str:
    (ids,) = speaker.requests[0]["input_ids"]
    return Letters().decode(ids)


def test_a_data_set_is_prompt_data(environments: Any, tmp_path: Path) -> None:
    prompts(environments.single, tmp_path / "all.jsonl")
    prompts(environments.single, tmp_path / "one.jsonl", count=1)
    prompts(environments.single, tmp_path / "eval.jsonl", evaluation=True)
    rows = {name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("all", "one", "eval")}
    assert [len(lines) for lines in rows.values()] == [2, 1, 1]
    first = json.loads(rows["one"][0])
    assert [message["content"] for message in first["input"]] == ["Be brief.", "2 + 2?"] and first["label"] == "4"
    assert json.loads(rows["eval"][0])["metadata"]["verifiers"]["answer"] == "7"


def test_one_turn_is_scored_by_the_rubric(speaker: Speaker, play: Callable[..., list[Sample]]) -> None:
    speaker.lines = ["7"]
    (sample,) = play("single", row=1)
    assert sample.response == "7" and sample.reward == 2.0 and sample.status is Sample.Status.COMPLETED
    assert sample.metadata["verifiers_metrics"] == {"right": 2.0, "turns": 1.0, "num_turns": 1.0}
    sent = first_prompt(speaker)
    assert sent.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3 + 4?<|im_end|>")


def test_several_turns_are_one_sample_with_the_environments_turns_masked(
    speaker: Speaker, play: Callable[..., list[Sample]]
) -> None:
    speaker.lines = ["5", "6", "4"]
    (sample,) = play("again")
    assert sample.reward == 1.0 and sample.metadata["verifiers_metrics"]["turns"] == 3.0
    tokens = sample.tokens[-sample.response_length :]
    trained = Letters().decode([token for token, mask in zip(tokens, sample.loss_mask, strict=True) if mask])
    assert trained == "5<|im_end|>6<|im_end|>4<|im_end|>" and "Again." in sample.response
    assert sample.metadata["drifted_turns"] == 0


def test_tools_of_an_environment_are_called(speaker: Speaker, play: Callable[..., list[Sample]]) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    speaker.lines = [call, "4"]
    (sample,) = play("tools", tool_calls="qwen")
    assert '"name": "add"' in first_prompt(speaker), "the model is told of the tool"
    assert sample.reward == 1.0 and "tool\n4" in sample.response
    tokens = sample.tokens[-sample.response_length :]
    trained = Letters().decode([token for token, mask in zip(tokens, sample.loss_mask, strict=True) if mask])
    assert trained == f"{call}<|im_end|>4<|im_end|>"


def test_an_environment_that_fails_costs_its_sample_alone(
    speaker: Speaker, play: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch, environments: Any
) -> None:
    async def fail(self: Any, messages: Any, state: Any, **kwargs: Any) -> None:
        raise environments.vf.Error("no connection to the game")

    monkeypatch.setattr(environments.Again, "env_response", fail)
    speaker.lines = ["5"]
    (sample,) = play("again")
    assert sample.status is Sample.Status.FAILED and sample.reward is None
    assert "no connection to the game" in sample.metadata["episode_error"]


def test_an_empty_answer_is_scored_by_the_rubric(speaker: Speaker, play: Callable[..., list[Sample]]) -> None:
    """Were it left out of the training, it would be a way out of a game that is lost."""
    speaker.lines = ["5", ""]
    (sample,) = play("again")
    assert sample.status is Sample.Status.COMPLETED and sample.reward == 0.0
    assert sample.loss_mask[-1] == 1 and sample.metadata["verifiers_metrics"]["turns"] == 1.0


def test_what_cannot_work_is_refused_before_the_run() -> None:
    with pytest.raises(NotAvailable, match="SimpleNamespace is not supported yet: it is neither a vf.Environment nor"):
        episodes(SimpleNamespace)
    with pytest.raises(InvalidSetting, match="scores the samples of a prompt together"):
        episodes(lambda: SimpleNamespace(run_rollout=None, requires_group_rollouts=True))


def test_a_sample_without_its_row_is_named() -> None:
    agent = episodes(lambda: SimpleNamespace(run_rollout=None, requires_group_rollouts=False))
    with pytest.raises(InvalidField, match="the key 'verifiers', as prompts"):
        asyncio.run(agent("http://x", Sample(prompt="x", metadata={"seed": 1}), "", "m"))
