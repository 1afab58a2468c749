"""Adapters: TRL's reward functions, text games with the interface of gymnasium, games of textarena."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_fakes import EOS, VOCABULARY, CharTokenizer, FakeBuffer, prompt_groups

from slime.rollout.adapters import gym, verifiers
from slime.rollout.adapters.gym import TextArena, episodes, prompts
from slime.rollout.adapters.trl import trl_reward
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.calls.outputs import flatten
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.sources import LeasedDataSource
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable

ARGS = SimpleNamespace(label_key="answer")


def score(function: Any, samples: list[Sample]) -> list[float]:
    return asyncio.run(function(ARGS, samples))


def chat_sample(response: str, label: str, **metadata: Any) -> Sample:
    sample = Sample(prompt="rendered", label=label, response=response, tokens=[1, 2, 3], response_length=2)
    sample.prompt_messages = [{"role": "user", "content": "2 + 2?"}]
    sample.metadata = metadata
    return sample


def exact(prompts: list[Any], completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """A reward of conversations as TRL's own pages have it."""
    assert [prompt[-1]["content"] for prompt in prompts] == ["2 + 2?"] * 2
    return [float(c[0]["content"] == right) for c, right in zip(completions, answer, strict=True)]


async def brief(completions: list[Any], completion_ids: list[list[int]], level: list[Any], **kwargs: Any) -> list[Any]:
    assert completion_ids == [[2, 3]] * 2
    return [None if each is None else -float(len(c[0]["content"])) for c, each in zip(completions, level, strict=True)]


def test_functions_of_trl_get_conversations_columns_and_tokens() -> None:
    samples = [chat_sample("4", "4", level="easy"), chat_sample("four", "4")]
    assert score(trl_reward(exact), samples) == [1.0, 0.0]
    assert score(trl_reward(exact, brief, weights=[1.0, 0.5]), samples) == [0.5, 0.0]
    with pytest.raises(InvalidField, match="every reward function returned None for sample"):
        score(trl_reward(brief), samples)


def test_text_prompts_stay_text_and_a_function_without_kwargs_gets_what_it_names() -> None:
    def same(prompts: list[str], completions: list[str]) -> list[float]:
        return [float(prompt == completion) for prompt, completion in zip(prompts, completions, strict=True)]

    samples = [Sample(prompt="ab", response="ab"), Sample(prompt="ab", response="ba")]
    assert score(trl_reward(same), samples) == [1.0, 0.0]


def test_an_answer_of_another_length_and_wrong_weights_are_refused() -> None:
    with pytest.raises(InvalidField, match="short returned 1 reward, expected a list of 2"):

        def short(**kwargs: Any) -> list[float]:
            return [1.0]

        score(trl_reward(short), [Sample(prompt="a"), Sample(prompt="a")])
    with pytest.raises(InvalidField, match="text returned '11', expected a list of 2"):

        def text(**kwargs: Any) -> str:
            return "11"

        score(trl_reward(text), [Sample(prompt="a"), Sample(prompt="a")])
    with pytest.raises(InvalidField, match="weights"):
        trl_reward(exact, weights=[1.0, 2.0])


class NextDigit:
    """Asks for the digit after the one that it shows, three times."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.shown, self.first = int(seed or 0), int(seed or 0)
        return str(self.shown), {}

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        gained = float(action == str(self.shown + 1))
        self.shown += 1
        return str(self.shown), gained, self.shown == self.first + 3, False, {}


class Strict(NextDigit):
    """Takes a point for a wrong answer."""

    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        shown, gained, *rest = super().step(action)
        return shown, gained or -1.0, *rest


class Remote:
    """The game, asynchronous, with an end."""

    closed = 0

    def __init__(self) -> None:
        self.game = NextDigit()

    async def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.game.reset(seed=seed)

    async def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "0":
            raise ConnectionError("the game is gone")
        return self.game.step(action)

    async def close(self) -> None:
        Remote.closed += 1


play = episodes(NextDigit)
play_remote = episodes(Remote)  # type: ignore[arg-type]
play_strict = episodes(Strict)
play_twice = episodes(NextDigit, max_turns=2)


def next_digit(ids: list[int], params: dict[str, Any]) -> list[int]:
    """Right but for the digit after 4."""
    last = [VOCABULARY[i] for i in ids if VOCABULARY[i].isdigit()][-1]
    return [VOCABULARY.index("0" if last == "4" else str(int(last) + 1)), EOS]


def run(state: Any, buffer: FakeBuffer) -> RolloutFnTrainOutput:
    token = CALL.set(RolloutCall(7, state.args.rollout_batch_size))
    try:
        with LeasedDataSource(buffer, worker_id="test", wait_seconds=0.05) as source:
            output = generate_rollout(state.args, 7, source, evaluation=False)
            source.complete_rest([flatten(group) for group in output.samples])
            return output
    finally:
        CALL.reset(token)


def played(
    engine: Any, make_state: Any, function: str, prompt: Any, seed: int, tokens: int = 16, **more: Any
) -> Sample:
    engine.answer = next_digit
    path = f"{__name__}.{function}"
    settings = {"custom_generate_function_path": path, "rm_type": None, "rollout_max_response_len": tokens} | more
    state = make_state(engine, rollout_batch_size=1, **settings)
    groups = prompt_groups(1, 1)
    groups[0].samples[0].prompt = prompt
    groups[0].samples[0].metadata = {"seed": seed}
    buffer = FakeBuffer(groups)
    run(state, buffer)
    return buffer.completed[0][0]


def test_a_game_is_played_over_several_turns_and_only_the_models_tokens_are_trained(engine, make_state) -> None:
    sample = played(engine, make_state, "play", "3", 3)
    # The model's 4, the game's 4, the model's 0 (wrong), the game's 5, the model's 6.
    assert sample.response == "44056" and sample.reward == 2.0
    assert sample.metadata["actions"] == ["4", "0", "6"]
    masks = dict(zip(range(sample.response_length), sample.loss_mask, strict=True))
    game = [i for i, mask in masks.items() if not mask]
    assert [VOCABULARY[sample.tokens[-sample.response_length :][i]] for i in game] == ["4", "5"]
    assert sample.status is Sample.Status.COMPLETED


def test_earlier_turns_of_an_episode_are_trained_where_what_is_continued_is_not(engine, make_state) -> None:
    sample = played(engine, make_state, "play", "3", 3, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    assert sample.response == "44056" and list(sample.loss_mask) == [1, 1, 0, 1, 1, 0, 1, 1]


class Talkative(NextDigit):
    def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        shown, *rest = super().step(action)
        return shown * 50, *rest


play_talkative = episodes(Talkative)


def test_a_games_answer_that_has_no_room_ends_the_episode(engine, make_state) -> None:
    sample = played(engine, make_state, "play_talkative", "3", 3, tokens=10)
    assert sample.response == "4" and sample.reward == 1.0 and sample.response_length == 2
    assert sample.status is Sample.Status.TRUNCATED


def test_a_games_answer_cannot_pass_for_the_template(engine, make_state, monkeypatch) -> None:
    monkeypatch.setattr(CharTokenizer, "chat_template", "{{ messages }}", raising=False)
    sample = Sample(prompt=[{"role": "user", "content": "1"}], tokens=[1, EOS])
    text = gym._behind_an_answer(CharTokenizer(), sample, f"1{gym.MARK}2")
    assert text == f"1{gym.MARK}2>"


def test_a_game_ends_after_max_turns(engine, make_state) -> None:
    sample = played(engine, make_state, "play_twice", "1", 1)
    assert sample.metadata["actions"] == ["2", "3"] and sample.reward == 2.0


def test_where_the_games_answer_takes_the_last_tokens_nothing_is_played_for_the_model(engine, make_state) -> None:
    # The model's 4 and its end, the game's 4.
    sample = played(engine, make_state, "play_strict", "3", 3, tokens=3)
    assert sample.metadata["actions"] == ["4"] and sample.reward == 1.0
    assert sample.status is Sample.Status.TRUNCATED and sample.response_length == 3


def test_a_game_may_be_asynchronous_and_is_closed_however_it_ends(engine, make_state, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(Remote, "closed", 0)
    sample = played(engine, make_state, "play_remote", "1", 1)
    assert sample.reward == 3.0 and Remote.closed == 1
    with pytest.raises(ConnectionError, match="the game is gone"):
        played(engine, make_state, "play_remote", "4", 4)
    assert Remote.closed == 2
    prompts(Remote, range(3), tmp_path / "prompts.jsonl")  # type: ignore[arg-type]
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 3 and Remote.closed == 5


def test_an_environment_of_gymnasium_is_played_as_it_is(engine, make_state, monkeypatch) -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    space = gymnasium.spaces.Text(max_length=1, charset="0123456789")

    class Registered(NextDigit, gymnasium.Env):
        observation_space = action_space = space

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            gymnasium.Env.reset(self, seed=seed)
            return NextDigit.reset(self, seed=seed)

    gymnasium.register("NextDigit-v0", entry_point=Registered)
    monkeypatch.setitem(globals(), "play_registered", episodes(lambda: gymnasium.make("NextDigit-v0")))
    sample = played(engine, make_state, "play_registered", "3", 3)
    assert sample.response == "44056" and sample.reward == 2.0


def test_a_chat_gets_the_games_answer_as_its_template_writes_it(engine, make_state, monkeypatch) -> None:
    monkeypatch.setattr(CharTokenizer, "chat_template", "{{ messages }}", raising=False)
    sample = played(engine, make_state, "play", [{"role": "user", "content": "1"}], 1)
    assert sample.response == "22>33>4" and sample.reward == 3.0


def test_first_observations_are_prompt_data(tmp_path: Path) -> None:
    prompts(NextDigit, range(2), tmp_path / "chat.jsonl")
    prompts(NextDigit, [5], tmp_path / "text.jsonl", chat=False)
    rows = [json.loads(line) for line in (tmp_path / "chat.jsonl").read_text().splitlines()]
    assert rows[1] == {"input": [{"role": "user", "content": "1"}], "metadata": {"seed": 1}}
    assert json.loads((tmp_path / "text.jsonl").read_text())["input"] == "5"


def test_prompt_data_that_could_not_be_made_whole_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(ValueError, match="no seed"):
        prompts(NextDigit, [1, "no seed"], path)  # type: ignore[list-item]
    rows: list[dict[str, Any]] = [{"prompt": "2 - 2?", "answer": 0}, {"prompt": "0 / 0?", "answer": float("nan")}]
    environment = SimpleNamespace(
        requires_group_rollouts=False, run_rollout=None, get_dataset=lambda n: rows if n < 0 else rows[:n]
    )
    with pytest.raises(InvalidField, match="row 1: .*a row that JSON can hold"):
        verifiers.prompts(lambda: environment, path)
    assert not list(tmp_path.iterdir())
    verifiers.prompts(lambda: environment, path, count=1)
    assert json.loads(path.read_text())["label"] == "0"


def test_games_of_textarena_have_the_interface_of_gymnasium() -> None:
    pytest.importorskip("textarena", reason="textarena is not installed")
    game = TextArena("GuessTheNumber-v0")
    observation, _ = game.reset(seed=3)
    assert "between 1 and 20" in observation and TextArena("GuessTheNumber-v0").reset(seed=3)[0] == observation
    for number in range(1, 21):
        observation, reward, terminated, truncated, _ = game.step(f"[{number}]")
        if terminated or truncated:
            break
        assert "higher" in observation and reward == 0.0
    assert terminated and reward > 0
    with pytest.raises(InvalidSetting, match="the game must be an id of textarena, got 'Nope-v0'"):
        TextArena("Nope-v0")


def test_without_textarena_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(NotAvailable, match="requires the package textarena: pip install"):
        TextArena("Wordle-v0")
