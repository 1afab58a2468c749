"""One client for both kinds of engine: the embedded one, and the recording of SGLang's answers."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sglang_recording
from rollout_tiny_model import write_tiny_model

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.fleet.concurrency import EngineLoad
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.watched import FleetOptions
from slime.rollout.generate.sample import append_output
from slime.rollout.generate.state import eval_sampling_params, rollout_sampling_params
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import EngineError, InvalidField

RECORDING = (sys.executable, sglang_recording.__file__)
PROMPT = [4, 5, 6, 7]
Call = Callable[[Callable[[EngineClient], Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[EngineProcess]:
    if request.param == "embedded":
        process = start_embedded(EmbeddedOptions(model_path=str(model), threads=1))
    else:
        process = start_sglang(SGLangOptions(model_path=str(model), gpus=["0"], memory_saver=True, server=RECORDING))
    with process:
        yield process.wait_ready(120)


def caller(process: EngineProcess) -> Call:
    def run(function: Callable[[EngineClient], Any]) -> Any:
        async def inside() -> Any:
            async with EngineClient(process.url, process.name) as client:
                return await function(client)

        return asyncio.run(inside())

    return run


@pytest.fixture
def call(engine: EngineProcess, model: Path) -> Call:
    """call(lambda client: ...): runs it with a client; every test starts with version 0."""
    run = caller(engine)
    run(lambda client: client.update_weights_from_disk(str(model), 0))
    return run


@pytest.fixture
def sglang(engine: EngineProcess, call: Call) -> Call:
    if engine.kind != "sglang":
        pytest.skip("a call that only SGLang has")
    return call


SETTINGS = Namespace(**vars(RolloutSettings(hf_checkpoint="x", rollout_max_response_len=3, eval_min_new_tokens=1)))


def check_answer(answer: dict[str, Any], prompt: list[int], most: int) -> None:
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert 0 < len(ids) <= most
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), len(ids))
    assert meta["weight_version"] == "0" and isinstance(meta["cached_tokens"], int)
    for (log_prob, token, text), same in zip(meta["output_token_logprobs"], ids, strict=True):
        assert log_prob <= 0 and token == same and text is None
    assert isinstance(answer["text"], str)


def test_one_prompt_gets_one_answer(call: Call) -> None:
    answer = call(lambda c: c.generate(PROMPT, rollout_sampling_params(SETTINGS), rid="one"))
    check_answer(answer, PROMPT, most=3)
    assert answer["meta_info"]["id"] == "one"


def test_a_list_of_prompts_gets_a_list_in_order(call: Call) -> None:
    prompts = [PROMPT, [8, 9], [10, 11, 12]]
    params = [rollout_sampling_params(SETTINGS) | {"max_new_tokens": n, "sampling_seed": n} for n in (1, 2, 3)]
    answers = call(lambda c: c.generate(prompts, params, rid=["a", "b", "c"]))
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
    for answer, prompt, most in zip(answers, prompts, (1, 2, 3), strict=True):
        check_answer(answer, prompt, most)
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 1}


def test_the_parameters_of_an_evaluation_are_understood(call: Call) -> None:
    params = eval_sampling_params(SETTINGS) | {"temperature": 0, "stop": ["x"], "stop_token_ids": [2]}
    check_answer(call(lambda c: c.generate(PROMPT, params)), PROMPT, most=3)


def test_a_parameter_out_of_range_is_refused(call: Call) -> None:
    with pytest.raises(InvalidField, match="400.*top_p"):
        call(lambda c: c.generate(PROMPT, {"top_p": 0}))


def test_an_answer_becomes_tokens_of_a_sample(call: Call) -> None:
    answer = call(lambda c: c.generate(PROMPT, rollout_sampling_params(SETTINGS)))
    sample = Sample(tokens=PROMPT)
    append_output(Namespace(), sample, answer)
    sample.validate()
    assert sample.tokens == PROMPT + answer["output_ids"]
    assert sample.weight_versions == ["0"] and sample.spans[0].weight_version == "0"
    assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


def test_nuclei_of_an_answer_become_those_of_a_sample(engine: EngineProcess, call: Call) -> None:
    params = rollout_sampling_params(SETTINGS) | {"top_p": 0.9, "top_k": 2}
    answer = call(lambda c: c.generate([PROMPT], [params], **KINDS[engine.kind].nuclei))[0]
    sample = Sample(tokens=PROMPT)
    append_output(Namespace(), sample, answer)
    sample.validate()
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    assert ids is not None and offsets is not None and sample.rollout_log_probs is not None
    for token, (first, last), log_prob in zip(
        answer["output_ids"], pairwise(offsets), sample.rollout_log_probs, strict=True
    ):
        assert token in ids[first:last] and last - first <= 2
        assert log_prob <= 0 and (log_prob > -1e-6) == (last - first == 1)
    if engine.kind == "sglang":
        assert sample.rollout_log_probs == [-0.25] * len(answer["output_ids"])


@pytest.mark.parametrize("top_k", [-1, 2])
def test_nuclei_are_asked_for_where_the_engine_returns_them(engine: EngineProcess, call: Call, top_k: int) -> None:
    async def generate() -> dict[str, Any]:
        params = rollout_sampling_params(SETTINGS) | {"top_p": 0.9, "top_k": top_k}
        return (await fleet.generate([PROMPT], [params]))[0]

    loop = LoopThread()
    # The fleet must not stop the engine of the other tests.
    fleet = Fleet([RemoteEngine(engine.name, engine.url, engine.kind)], loop, FleetOptions(nuclei=True))
    try:
        answer = asyncio.run(generate())
    finally:
        fleet.stop()
        loop.stop()
    check_answer(answer, PROMPT, most=3)
    assert ("top_p_token_ids" in answer["meta_info"]) == (top_k > 0 or engine.kind == "embedded")


def test_control_calls_answer(call: Call) -> None:
    call(lambda c: c.abort("nobody"))
    call(lambda c: c.flush_cache(1.0))
    call(lambda c: c.health_generate())
    assert call(lambda c: c.server_info())["weight_version"] == "0"
    assert call(lambda c: c.model_info())["is_generation"] is True


def test_an_idle_engine_reports_its_load(call: Call) -> None:
    load = EngineLoad.from_answer(call(lambda c: c.loads(5.0)))
    assert (load.running, load.waiting, load.usage) == (0, 0, 0.0) and load.capacity > 0


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_paused_engine_keeps_new_requests_until_it_goes_on(call: Call, mode: str) -> None:
    async def scenario(client: EngineClient) -> dict[str, Any]:
        await client.pause(mode)
        request = asyncio.ensure_future(client.generate(PROMPT, rollout_sampling_params(SETTINGS)))
        done, _ = await asyncio.wait({request}, timeout=0.2)
        assert not done
        await client.continue_()
        return await request

    check_answer(call(scenario), PROMPT, most=3)


def test_weights_from_a_directory_bring_their_version(call: Call, model: Path, tmp_path: Path) -> None:
    assert call(lambda c: c.update_weights_from_disk(str(model), 7))["success"] is True
    assert call(lambda c: c.weight_version()) == "7"
    assert call(lambda c: c.generate(PROMPT, rollout_sampling_params(SETTINGS)))["meta_info"]["weight_version"] == "7"
    with pytest.raises(InvalidField, match="nothing"):
        call(lambda c: c.update_weights_from_disk(str(tmp_path / "nothing"), 8))
    assert call(lambda c: c.weight_version()) == "7"


def test_the_weights_checker_finds_what_an_update_left_out(call: Call, model: Path) -> None:
    first = call(lambda c: c.check_weights())["per_engine_checksum"]
    call(lambda c: c.check_weights("snapshot"))
    call(lambda c: c.check_weights("reset_tensors"))
    assert call(lambda c: c.check_weights())["per_engine_checksum"] != first
    with pytest.raises(InvalidField, match="check tensor equality failed"):
        call(lambda c: c.check_weights("compare"))
    call(lambda c: c.update_weights_from_disk(str(model), 1))
    assert call(lambda c: c.check_weights("compare"))["success"] is True
    assert call(lambda c: c.check_weights())["per_engine_checksum"] == first


def test_memory_is_released_and_resumed(call: Call, model: Path) -> None:
    call(lambda c: c.release_memory(["weights", "kv_cache"]))
    call(lambda c: c.resume_memory(["weights"]))
    call(lambda c: c.update_weights_from_disk(str(model), 0))
    call(lambda c: c.resume_memory(["kv_cache"]))
    check_answer(call(lambda c: c.generate(PROMPT, rollout_sampling_params(SETTINGS))), PROMPT, most=3)


def test_an_aborted_request_answers_with_what_it_has(sglang: Call) -> None:
    async def scenario(client: EngineClient) -> list[dict[str, Any]]:
        held = [asyncio.ensure_future(client.generate([3, 4], {}, rid=rid)) for rid in ("mine", "other")]
        done: set[Any] = set()
        while not done:  # until the request has arrived there, an abort finds nothing
            await client.abort("mine")
            done, _ = await asyncio.wait({held[0]}, timeout=0.05)
        assert not held[1].done()
        await client.abort()
        return [await request for request in held]

    for answer in sglang(scenario):
        sample = Sample(tokens=[3, 4])
        append_output(Namespace(), sample, answer)
        assert sample.status is Sample.Status.ABORTED and sample.response_length == 1


def test_weights_from_tensors_and_from_a_group_are_sent_as_sglang_reads_them(
    sglang: Call, engine: EngineProcess
) -> None:
    sglang(lambda c: c.update_weights_from_tensor([b"rank 0"], load_format="flattened_bucket", weight_version=3))
    assert sglang(lambda c: c.weight_version()) == "3"
    group: dict[str, Any] = dict(master_address="h", master_port=1, rank_offset=1, world_size=3)
    sglang(lambda c: c.init_weights_update_group(**group))
    names: dict[str, Any] = dict(names=["a"], dtypes=["bfloat16"], shapes=[(2, 3)])
    sglang(lambda c: c.update_weights_from_distributed(**names, flush_cache=False))
    assert sglang(lambda c: c.weight_version()) == "3"
    sglang(lambda c: c.destroy_weights_update_group())
    last = sglang(lambda c: c.get("/calls"))["last"]
    assert last["/update_weights_from_tensor"] == {
        "serialized_named_tensors": ["cmFuayAw"], "load_format": "flattened_bucket", "flush_cache": True,
        "weight_version": "3",
    }  # fmt: skip
    assert last["/init_weights_update_group"] == group | {"group_name": "weight_update_group", "backend": "nccl"}
    assert last["/update_weights_from_distributed"] == {
        "names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "group_name": "weight_update_group",
        "load_format": None, "flush_cache": False,
    }  # fmt: skip


def test_speculative_counts_and_a_missing_text_are_taken_from_sglang(model: Path) -> None:
    options = SGLangOptions(
        model_path=str(model), gpus=["0"], server=RECORDING,
        args={"speculative_algorithm": "EAGLE", "skip_tokenizer_init": True},
    )  # fmt: skip
    with start_sglang(options).wait_ready(240) as process:
        answer = caller(process)(lambda c: c.generate(PROMPT, {}))
    assert "text" not in answer
    sample = Sample(tokens=PROMPT)
    append_output(Namespace(sglang_speculative_algorithm="EAGLE"), sample, answer)
    info = sample.spec_info
    assert (info.spec_accept_token_num, info.spec_draft_token_num, info.spec_verify_ct) == (3, 6, 2)


def test_a_failed_answer_with_status_200_is_an_error() -> None:
    from rollout_fakes import FakeEngine

    engine = FakeEngine()

    async def ask() -> None:
        async with EngineClient(engine.url, "old-0") as client:
            await client.post("/refuses", {})

    try:
        with pytest.raises(EngineError, match="old-0 could not POST /refuses: no such tensor"):
            asyncio.run(ask())
    finally:
        engine.stop()
