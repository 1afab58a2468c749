"""Log-probs of a teacher behind HTTP: what it is asked, and what becomes of its answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime.rollout.on_policy_distillation import post_process_rewards, response_log_probs, reward_func
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting

TOKENS = [5, 6, 7, 8]


async def ask(entries: Any) -> tuple[float, Sample, dict[str, Any]]:
    """Scores a sample with a teacher that answers with `entries`; returns the request too."""
    requests = []

    async def generate(request: web.Request) -> web.Response:
        requests.append(await request.json())
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": entries}})

    application = web.Application()
    application.router.add_post("/generate", generate)
    sample = Sample(tokens=TOKENS, response_length=2, status=Sample.Status.COMPLETED)
    async with TestServer(application) as server:
        reward = await reward_func(SimpleNamespace(rm_url=str(server.make_url("/generate"))), sample)
    return reward, sample, requests[0]


def test_a_sample_gets_the_teachers_log_probs_of_its_response() -> None:
    entries = [[None, 5, None], [-0.5, 6, None], [-1.5, 7, None], [-2.5, 8, None]]
    reward, sample, request = asyncio.run(ask(entries))
    assert reward == 0.0 and sample.teacher_log_probs == [-1.5, -2.5]
    assert request["input_ids"] == TOKENS and request["return_logprob"] and request["logprob_start_len"] == 0
    assert request["sampling_params"]["max_new_tokens"] == 0
    assert post_process_rewards(None, [sample, sample]) == ([0.0, 0.0], [0.0, 0.0])


@pytest.mark.parametrize("entries", [None, [[-0.5, 6, None]], [[None, 5, None], [-1, 6, None], [-1, 9, None], [-1, 8]]])
def test_an_answer_about_other_tokens_is_refused(entries: Any) -> None:
    with pytest.raises(InvalidField, match="input_token_logprobs.*4 tokens"):
        asyncio.run(ask(entries))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([None] * 4, r"input_token_logprobs\[0\]: got null, expected .*here token 5"),
        ([5, 6, 7, 8], r"\[0\]: got 5, "),
        ([[None, 5], [-0.5], [-1, 7], [-1, 8]], r"\[1\]: got \[-0.5\], "),
        ([[None, 5], [-0.5, 6], [None, 7], [-1, 8]], r"\[2\]: got \[null, 7\], .*a number"),
        ([[None, 5], [-0.5, 6], ["x", 7], [-1, 8]], r'\[2\]: got \["x", 7\], '),
        ([[None, 5], [-0.5, 6], [-1, 7], [float("nan"), 8]], r"\[3\]: got \[NaN, 8\], "),
        ("x" * 1000, "got .{150,250}, expected"),
        ({"5": -1}, "got "),
    ],
)
def test_a_malformed_answer_is_refused_with_what_came(entries: Any, words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        asyncio.run(ask(entries))


@pytest.mark.parametrize("answer", [None, [1], "no", {"detail": "busy"}, {"meta_info": [1]}])
def test_an_answer_that_is_no_engines_is_refused_with_what_came(answer: Any) -> None:
    with pytest.raises(InvalidField, match="--rm-url: got .*expected meta_info.input_token_logprobs"):
        response_log_probs(answer, TOKENS, 2)


def test_the_teachers_address_is_required() -> None:
    with pytest.raises(InvalidSetting, match="reward_func requires --rm-url URL"):
        asyncio.run(reward_func(SimpleNamespace(rm_url=None), Sample(tokens=TOKENS, response_length=2)))
