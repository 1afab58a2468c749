"""Rewards: the built-in ones, the user's, and what is refused."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest
from aiohttp import web

from slime.rollout.rewards.boxed import last_boxed
from slime.rollout.rewards.built_in import remote
from slime.rollout.rewards.built_in.math import pool as math_reward
from slime.rollout.rewards.score import score_group, score_sample
from slime.rollout.rm_hub import async_rm, batched_async_rm, remote_rm
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, Unavailable


def args(**values: Any) -> Namespace:
    base = dict(rm_type=None, custom_rm_path=None, reward_key=None, eval_reward_key=None, rm_url=None, rollout_seed=1)
    return Namespace(**(base | values))


def finished(response: str, label: Any, **fields: Any) -> Sample:
    return Sample(index=3, response=response, label=label, status=Sample.Status.COMPLETED, **fields)


def reward_of(rm_type: str, response: str, label: Any, **fields: Any) -> Any:
    return asyncio.run(async_rm(args(rm_type=rm_type), finished(response, label, **fields)))


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [("It is 12, so 7", "7", 1.0), ("7 or 8", 7, 0.0), ("-3", "-3", 1.0), ("no number", "1", 0.0), ("007", "7", 1.0)],
)
def test_integer(response, label, reward):
    assert reward_of("integer", response, label) == reward


@pytest.mark.parametrize(
    ("response", "status", "reward"),
    [
        ("321", "completed", 1.0),
        ("321", "truncated", 0.375),
        ("320", "completed", 0.375),
        ("3", "completed", 0.125),
        ("", "completed", 0.0),
    ],
)
def test_exact_partial(response, status, reward):
    sample = finished(response, "321")
    sample.status = Sample.Status(status)
    assert asyncio.run(async_rm(args(rm_type="exact_partial"), sample)) == reward


def test_math_verify_compares_values_and_survives_an_expression_without_end(monkeypatch):
    assert reward_of("math", "The answer is $\\frac{1}{2}$.", "0.5") == 1.0
    assert reward_of("math", "so \\boxed{2x+1}", "1+2x") == 1.0
    assert reward_of("math", "41", "42") == 0.0
    monkeypatch.setattr(math_reward, "ANSWER_SECONDS", 0.0)
    assert reward_of("math", "42", "42") == 0.0
    monkeypatch.undo()
    assert reward_of("math", "42", "42") == 1.0, "a worker that was given up is replaced"


def test_boxed_prefix():
    assert last_boxed("a \\boxed{1} b \\boxed{\\frac{1}{2}} c") == "\\frac{1}{2}"
    assert last_boxed("nothing") is None and last_boxed("\\boxed{open") is None
    assert reward_of("boxed_integer", "first 5, then \\boxed{4}, not 6", "4") == 1.0


def test_reasoning_gym_scores_with_the_data_set_that_the_metadata_name():
    metadata = {"source_dataset": "chain_sum", "source_index": 0}
    assert reward_of("reasoning_gym", "12", "12", metadata=metadata) == 1.0
    assert reward_of("reasoning_gym", "13", "12", metadata=metadata) < 1.0
    with pytest.raises(InvalidField, match="source_dataset.*no_such_set"):
        reward_of("reasoning_gym", "13", "12", metadata={"source_dataset": "no_such_set"})


def test_an_answer_with_which_a_scorer_of_reasoning_gym_fails_is_wrong_and_a_broken_entry_is_an_error(monkeypatch):
    def scorer(answer, entry):
        return 1.0 if float(answer) == float(entry["answer"]) else 0.0

    monkeypatch.setattr("slime.rollout.rewards.built_in.reasoning_gym._scorer", lambda name: scorer)
    metadata = {"source_dataset": "chain_sum"}
    assert reward_of("reasoning_gym", "12", "12", metadata=metadata) == 1.0
    assert reward_of("reasoning_gym", "twelve", "12", metadata=metadata) == 0.0
    with pytest.raises(InvalidField, match="cannot score with this entry of the data set chain_sum: ValueError"):
        reward_of("reasoning_gym", "12", "dozen", metadata=metadata)


def test_reasoning_gym_scores_a_row_of_generated_prompt_data_and_an_answer_between_tags():
    entry = {"question": "What is 5 + 7?", "answer": "12", "metadata": {"source_dataset": "chain_sum"}}
    metadata = {"rm_type": "reasoning_gym", "source_dataset": "chain_sum", "entry": entry}
    for response in ("12", "5 + 7 is <answer>11</answer>, no: <answer> 12 </answer>"):
        assert reward_of("reasoning_gym", response, None, metadata=metadata) == 1.0
    assert reward_of("reasoning_gym", "<answer>11</answer> 12", None, metadata=metadata) < 1.0
    assert reward_of("reasoning_gym", "<answer>12", None, metadata=metadata) < 1.0


def test_metadata_wins_and_unknown_names_get_the_nearest():
    assert reward_of("integer", "x", "1", metadata={"rm_type": "random"}) in (0.0, 1.0)
    with pytest.raises(InvalidSetting, match="did you mean integer"):
        reward_of("intger", "1", "1")
    with pytest.raises(InvalidSetting, match=r"unknown reward function 'xyz'; known ones are math, .*, boxed_NAME"):
        reward_of("xyz", "1", "1")
    with pytest.raises(InvalidSetting, match="unknown reward function 'boxed_intger'; did you mean boxed_integer"):
        reward_of("boxed_intger", "1", "1")
    with pytest.raises(InvalidSetting, match="--rm-type is required: sample 3"):
        reward_of("", "1", "1")


async def gives_none(args, sample):
    return None


async def gives_nan(args, sample):
    return float("nan")


async def gives_dict(args, sample):
    return {"score": 0.5, "note": "half"}


def gives_length(args, sample):
    return len(sample.response)


async def gives_many(args, samples):
    return [float(len(sample.response)) for sample in samples]


@pytest.mark.parametrize("name", ["gives_none", "gives_nan", "gives_dict"])
def test_what_is_no_number_names_the_sample_and_the_function(name):
    with pytest.raises(InvalidField, match=f"{name} returned .* for sample 3"):
        asyncio.run(score_sample(args(custom_rm_path=f"{__name__}.{name}"), finished("x", "x")))


def test_a_number_has_no_key():
    with pytest.raises(InvalidField, match="gives_length returned 4 for sample 3: --reward-key score requires a dict"):
        asyncio.run(
            score_sample(args(custom_rm_path=f"{__name__}.gives_length", reward_key="score"), finished("four", "x"))
        )


def test_dict_rewards_and_functions_that_are_not_async():
    sample = finished("four", "x")
    asyncio.run(score_sample(args(custom_rm_path=f"{__name__}.gives_dict", reward_key="score"), sample))
    assert sample.reward == {"score": 0.5, "note": "half"} and sample.get_reward_value(args(reward_key="score")) == 0.5
    asyncio.run(score_sample(args(), sample := finished("four", "x", custom_rm_path=f"{__name__}.gives_length")))
    assert sample.reward == 4.0


def test_group_rewards():
    samples = [finished("a", ""), finished("bb", "")]
    custom = args(custom_rm_path=f"{__name__}.gives_many")
    assert asyncio.run(batched_async_rm(custom, samples)) == [1.0, 2.0]
    asyncio.run(score_group(custom, samples))
    assert [sample.reward for sample in samples] == [1.0, 2.0]
    with pytest.raises(InvalidField, match="expected a list of 2 rewards, one for each sample"):
        asyncio.run(score_group(args(custom_rm_path=f"{__name__}.gives_length2"), samples))


async def gives_length2(args, samples):
    return [1.0]


def test_remote_rm_tries_again_and_gives_up(monkeypatch):
    seen: list[dict[str, Any]] = []

    async def check() -> None:
        async def answer(request: web.Request) -> web.Response:
            seen.append(await request.json())
            return web.json_response(0.25, status=500 if len(seen) < 3 else 200)

        app = web.Application()
        app.router.add_post("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        waits: list[float] = []

        async def no_wait(seconds: float) -> None:
            waits.append(seconds)

        monkeypatch.setattr(remote.asyncio, "sleep", no_wait)
        sample = finished("r", "l", prompt="p")
        assert await remote_rm(args(rm_url=f"http://127.0.0.1:{port}/"), sample) == 0.25
        assert len(seen) == 3 and seen[0] == {"prompt": "p", "response": "r", "label": "l"}
        assert 1 <= waits[0] <= 2 and 2 <= waits[1] <= 3
        await runner.cleanup()
        with pytest.raises(Unavailable, match="10 tries"):
            await remote_rm(args(rm_url=f"http://127.0.0.1:{port}/"), sample)

    asyncio.run(check())
