"""A sample in the hands of a user's function: rendered prompt, lists, a response without stop token, fresh seeds."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
from aiohttp import web
from rollout_fakes import EOS, FakeBuffer, FakeEngine, prompt_groups, reverse

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.generate.evaluation import eval_rollout
from slime.rollout.generate.state import RolloutState
from slime.rollout.prompts.encoder import unrendered
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout, get_model_url
from slime.rollout.sources import EvaluationSource, LeasedDataSource
from slime.types import Sample, SampleGroup
from slime.types.errors import EngineError, InvalidField, Unavailable
from slime.utils.http_utils import post

SEEN: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def seen() -> dict[str, Any]:
    SEEN.clear()
    return SEEN


def run(state: RolloutState, buffer: FakeBuffer) -> None:
    token = CALL.set(RolloutCall(7, state.args.rollout_batch_size))
    try:
        with LeasedDataSource(buffer, worker_id="test", wait_seconds=0.05, render=state.prompts.render) as source:
            generate_rollout(state.args, 7, source, evaluation=False)
    finally:
        CALL.reset(token)


def chat_groups(count: int, n: int, prompt: Any = "123") -> list[SampleGroup]:
    """Prompts that only the chat template makes complete: it appends ">"."""
    groups = prompt_groups(count, n)
    for group in groups:
        for sample in group.samples:
            sample.prompt, sample.label = copy.deepcopy(prompt), "321"
    return groups


async def tokenizes_the_prompt(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    SEEN.setdefault("generate", []).append(sample.prompt)
    state = GenerateState(args)
    sample.tokens = state.tokenizer.encode(sample.prompt)
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(get_model_url(args), payload)
    new = output["meta_info"]["output_token_logprobs"]
    response = [item[1] for item in new]
    sample.tokens = sample.tokens + response
    sample.response_length = len(response)
    sample.response = output["text"]
    sample.loss_mask = [1] * len(response)
    sample.rollout_log_probs = [item[0] for item in new]
    sample.status = Sample.Status.COMPLETED
    return sample


async def exact(args: Any, sample: Sample, **kwargs: Any) -> float:
    SEEN.setdefault("reward", []).append((sample.prompt + sample.response, sum(sample.loss_mask), sample.tokens[:]))
    json.dumps([sample.tokens, sample.loss_mask, sample.rollout_log_probs])
    return float(sample.response == sample.label)


def hooked(args: Any, sample: Sample) -> None:
    SEEN.setdefault("hook", []).append(sample.prompt)


@pytest.mark.parametrize("prompt", ["123", [{"role": "user", "content": "123"}]])
@pytest.mark.parametrize("custom", [None, f"{__name__}.tokenizes_the_prompt"])
def test_everybody_sees_the_rendered_prompt(engine, make_state, prompt, custom):
    state = make_state(
        engine, rollout_batch_size=1, apply_chat_template=True, custom_generate_function_path=custom,
        custom_rm_path=f"{__name__}.exact", rm_type=None, rollout_sample_hook_path=[f"{__name__}.hooked"],
    )  # fmt: skip
    buffer = FakeBuffer(chat_groups(1, 2, prompt))
    run(state, buffer)
    ids = state.tokenizer.encode("123>")
    for sample in buffer.completed[0]:
        assert (sample.prompt, sample.reward) == ("123>", 1.0)
        assert sample.tokens[: len(ids)] == ids and len(sample.tokens) == len(ids) + sample.response_length
        assert sample.prompt_messages == [{"role": "user", "content": "123"}] and unrendered(sample) == "123"
    assert SEEN["hook"] == ["123>"] * 2 and SEEN.get("generate", ["123>"] * 2) == ["123>"] * 2
    assert SEEN["reward"] == [("123>321", 4, [*ids, *reverse(ids, {})])] * 2


def test_a_prompt_is_rendered_once_however_often_its_group_is_taken(engine, make_state):
    state = make_state(engine, rollout_batch_size=1, apply_chat_template=True)
    sample = chat_groups(1, 1)[0].samples[0]
    for _ in range(2):
        state.prompts.render([sample])
        assert sample.prompt == "123>" and state.prompts.encode(sample).tolist() == state.tokenizer.encode("123>")
        sample = pickle.loads(pickle.dumps(sample))


def test_a_prompt_that_the_template_refuses_costs_its_group_alone(engine, make_state, monkeypatch):
    state = make_state(engine, rollout_batch_size=1, apply_chat_template=True)
    good, bad = chat_groups(1, 1)[0], chat_groups(1, 1, [{"role": "nobody", "content": "1"}])[0]
    bad.group_index, bad.samples[0].group_index = 7, 7
    rendering = type(state.tokenizer).apply_chat_template

    def strict(self, messages, **kwargs):
        if messages[0]["role"] == "nobody":
            raise ValueError("no such role")
        return rendering(self, messages, **kwargs)

    monkeypatch.setattr(type(state.tokenizer), "apply_chat_template", strict)
    buffer = FakeBuffer([bad, good])
    run(state, buffer)
    assert buffer.rejected == [(7, "prompt_unusable")] and len(buffer.completed) == 1


def test_without_the_template_the_prompt_stays_what_it_was(engine, make_state):
    state = make_state(engine, rollout_batch_size=1)
    for prompt in ("123>", [{"role": "user", "content": "123"}]):
        buffer = FakeBuffer(chat_groups(1, 1, prompt))
        run(state, buffer)
        (sample,) = buffer.completed[0]
        assert sample.prompt == prompt and sample.tokens[:4] == state.tokenizer.encode("123>")


def test_an_evaluation_renders_too(engine, make_state):
    state = make_state(engine, apply_chat_template=True, custom_rm_path=f"{__name__}.exact", rm_type=None)
    buffer = FakeBuffer([], evaluation={"set": chat_groups(2, 1)})
    source = EvaluationSource(buffer, (), None, state.prompts.render)
    data = state.loop.run(eval_rollout(state.args, 0, source), timeout=120).data
    assert data["set"]["rewards"] == [1.0, 1.0] and {text for text, _, _ in SEEN["reward"]} == {"123>321"}


async def asks_four_times(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    assert "sampling_seed" not in sampling_params
    ids = GenerateState(args).tokenizer.encode(sample.prompt)
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    outputs = await asyncio.gather(*(post(get_model_url(args), payload) for _ in range(4)))
    SEEN.setdefault(sample.index, []).append([output["output_ids"] for output in outputs])
    return await generate(args, sample, sampling_params)


def of_the_seed(ids: list[int], params: dict[str, Any]) -> list[int]:
    """Answers as an engine that samples by the seed, or by itself where there is none."""
    seed = params.get("sampling_seed")
    of_the_seed.unseeded += seed is None
    return [2 + digit for digit in divmod(of_the_seed.unseeded if seed is None else seed % 100, 10)]


of_the_seed.unseeded = 0


def test_four_requests_of_a_sample_have_four_seeds_that_repeat_with_deterministic(make_state):
    runs = []
    for _ in range(2):
        SEEN.clear()
        engine = FakeEngine(of_the_seed)
        try:
            state = make_state(
                engine, rollout_batch_size=2, deterministic=True, rm_type="random",
                custom_generate_function_path=f"{__name__}.asks_four_times",
            )  # fmt: skip
            run(state, FakeBuffer(prompt_groups(2, 2)))
            seeds = [request["sampling_params"] for request in engine.requests]
            flat = [
                one["sampling_seed"] for params in seeds for one in (params if isinstance(params, list) else [params])
            ]
            assert len(set(flat)) == len(flat) == 20
            runs.append((copy.deepcopy(SEEN), sorted(flat)))
        finally:
            engine.stop()
    assert runs[0] == runs[1]
    assert all(len({tuple(ids) for ids in answers[0]}) == 4 for answers in runs[0][0].values())


def test_without_deterministic_what_a_function_posts_has_no_seed(make_state):
    engine = FakeEngine(of_the_seed)
    try:
        state = make_state(
            engine, rollout_batch_size=1, rm_type="random",
            custom_generate_function_path=f"{__name__}.asks_four_times",
        )  # fmt: skip
        run(state, FakeBuffer(prompt_groups(1, 1)))
        assert len({tuple(ids) for ids in SEEN[0][0]}) == 4
        posted = [r["sampling_params"] for r in engine.requests if isinstance(r["sampling_params"], dict)]
        assert all("sampling_seed" not in params for params in posted[:4])
    finally:
        engine.stop()


async def generates_copies(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    return [await generate(args, copy.deepcopy(sample), sampling_params) for _ in range(3)]


def test_copies_of_a_sample_that_are_generated_differ_too(make_state):
    engine = FakeEngine(of_the_seed)
    try:
        path = f"{__name__}.generates_copies"
        state = make_state(
            engine, rollout_batch_size=1, deterministic=True, rm_type="random", custom_generate_function_path=path
        )
        run(state, buffer := FakeBuffer(prompt_groups(1, 1)))
        assert len({tuple(sample.tokens) for sample in buffer.completed[0]}) == 3
    finally:
        engine.stop()


def test_args_have_the_declared_attributes_and_can_be_copied_and_pickled(engine, make_state):
    state = make_state(engine, rollout_batch_size=1)
    declared = {field.name for field in dataclasses.fields(RolloutArgs)} | set(RolloutArgs.__annotations__)
    assert declared <= vars(state.args).keys()
    for twin in (copy.copy(state.args), copy.deepcopy(state.args), pickle.loads(pickle.dumps(state.args))):
        assert twin.rollout_batch_size == 1 and GenerateState(twin) is state
    deep = copy.deepcopy(state.args)
    deep.rollout_stop = ["x"]
    assert state.args.rollout_stop != ["x"]
    # In another process there is no such state: the namespace arrives without one.
    assert pickle.loads(pickle.dumps(state.args).replace(state._key.encode(), b"0" * 32)).slime_generate_state is None


def text_alone(mask: list[int] | None) -> Any:
    async def function(args: Any, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
        for sample in samples:
            sample.response, sample.loss_mask = "321", mask
        return samples

    return function


one, masked, wrong_mask = text_alone(None), text_alone([1, 0, 1]), text_alone([1] * 5)


@pytest.mark.parametrize(("name", "trained"), [("one", 3), ("masked", 2)])
def test_text_without_tokens_is_tokenised_and_said_once(engine, make_state, caplog, name, trained):
    state = make_state(engine, rollout_batch_size=2, custom_generate_function_path=f"{__name__}.{name}")
    buffer = FakeBuffer(prompt_groups(2, 2))
    run(state, buffer)
    for group in (0, 1):
        for sample in buffer.completed[group]:
            assert sample.tokens == state.tokenizer.encode(sample.prompt + "321") and sample.response_length == 3
            assert sample.effective_response_length == trained and sample.rollout_log_probs is None
            assert sample.status is Sample.Status.COMPLETED
    assert [r.levelname for r in caplog.records if "set response but no tokens" in r.getMessage()] == ["WARNING"]


def test_text_that_cannot_be_tokenised_is_refused_with_the_reason(engine, make_state):
    path = f"{__name__}.wrong_mask"
    state = make_state(engine, rollout_batch_size=1, custom_generate_function_path=path)
    with pytest.raises(InvalidField, match=r"set response but no tokens.*loss_mask: got length 5.*3 tokens") as caught:
        run(state, FakeBuffer(prompt_groups(1, 1)))
    assert caught.value.field == "loss_mask"


def test_the_response_has_no_stop_token_and_the_tokens_have_it(engine, make_state):
    state = make_state(engine, rollout_batch_size=1, custom_rm_path=f"{__name__}.exact", rm_type=None)
    buffer = FakeBuffer(prompt_groups(1, 1))
    run(state, buffer)
    (sample,) = buffer.completed[0]
    assert sample.response == sample.label and sample.reward == 1.0
    assert sample.tokens[-1] == EOS and sample.response_length == len(sample.label) + 1
    assert len(sample.rollout_log_probs) == sample.response_length


def test_a_stop_token_of_the_settings_is_cut_and_only_at_the_end(make_state):
    engine = FakeEngine(lambda ids, params: [3, 5, 5])
    try:
        state = make_state(engine, rollout_batch_size=1, rollout_stop_token_ids=[5], rm_type="random")
        run(state, buffer := FakeBuffer(prompt_groups(1, 1)))
        assert buffer.completed[0][0].response == "13" and buffer.completed[0][0].tokens[-3:] == [3, 5, 5]
    finally:
        engine.stop()


async def scores_groups(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    SEEN.setdefault("groups", []).append([sample.index for sample in samples])
    return [float(len({sample.group_index for sample in samples})) for _ in samples]


@pytest.mark.parametrize("custom", [None, f"{__name__}.tokenizes_the_prompt"])
def test_a_function_for_groups_scores_the_groups_of_an_evaluation(engine, make_state, custom):
    path = f"{__name__}.scores_groups"
    state = make_state(
        engine, group_rm=True, custom_rm_path=path, rm_type=None, custom_generate_function_path=custom,
        n_samples_per_eval_prompt=2,
    )  # fmt: skip
    source = EvaluationSource(FakeBuffer([], evaluation={"set": prompt_groups(3, 2)}))
    data = state.loop.run(eval_rollout(state.args, 0, source), timeout=120).data
    assert data["set"]["rewards"] == [1.0] * 6 and sorted(SEEN["groups"]) == [[0, 1], [2, 3], [4, 5]]


def test_a_file_with_a_function_for_one_sample_scores_an_evaluation_one_by_one(engine, make_state, tmp_path):
    file = tmp_path / "rewards.py"
    file.write_text(
        "async def reward_func(args, sample):\n    return 0.25\n"
        "async def batched_custom_rm(args, samples):\n    return [0.5 for _ in samples]\n"
    )
    state = make_state(engine, group_rm=True, custom_rm_path=str(file), rm_type=None)
    source = EvaluationSource(FakeBuffer([], evaluation={"set": prompt_groups(2, 1)}))
    assert state.loop.run(eval_rollout(state.args, 0, source), timeout=120).data["set"]["rewards"] == [0.25] * 2


def test_a_finish_reason_that_is_not_known_ends_a_rollout(make_state, monkeypatch):
    engine = FakeEngine()
    answer = engine._output
    monkeypatch.setattr(
        engine,
        "_output",
        lambda *args, **kwargs: (
            (out := answer(*args, **kwargs)) | {"meta_info": out["meta_info"] | {"finish_reason": {"type": "odd"}}}
        ),
    )
    try:
        with pytest.raises(EngineError, match="finish_reason .*odd.*expected stop, length or abort"):
            run(make_state(engine, rollout_batch_size=1), FakeBuffer(prompt_groups(1, 1)))
    finally:
        engine.stop()


class Refusing:
    """A server that answers 400 with a reason, or JSON as text."""

    def __init__(self) -> None:
        self.tries = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.tries += 1
        if request.path == "/plain":
            return web.Response(text='{"a": 1}', content_type="text/plain")
        return web.Response(status=400, text="no such field: colour")


def test_a_post_that_is_refused_says_why_and_json_is_json():
    async def work() -> None:
        server = Refusing()
        app = web.Application()
        app.router.add_route("*", "/{name}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        try:
            assert await post(f"{url}/plain", {}, 1, {"x-a": "b"}) == {"a": 1}
            with pytest.raises(Unavailable, match="400: no such field: colour"):
                await post(f"{url}/refuses", {}, max_retries=1)
        finally:
            await runner.cleanup()

    asyncio.run(work())
