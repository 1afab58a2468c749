"""A real SGLang engine, started as `slime-rollout serve` starts it: answers, weights, memory, and its end.

    SLIME_TEST_MODEL=DIR pytest tests/gpu/test_sglang_engine.py

DIR: a Hugging Face directory of a small model. One engine serves all tests: its first start compiles kernels.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest

from gpu_needs import ATTENTION, MODEL, needs
from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.engines.sglang.read_flags import SOURCE, read_flags
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.watched import FleetOptions
from slime.rollout.generate.sample import append_output
from slime.rollout.generate.state import rollout_sampling_params
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import InvalidField, WrongState

NUM_GPUS = 1

START_SECONDS = 400
PROMPT = list(range(1000, 1040))
pytestmark = needs(NUM_GPUS, "sglang", model=True)
SETTINGS = Namespace(**vars(RolloutSettings(hf_checkpoint="x", rollout_max_response_len=16)))
GREEDY = rollout_sampling_params(SETTINGS) | {"temperature": 0.0, "ignore_eos": True}

Call = Callable[[Callable[[EngineClient], Any]], Any]


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    options = SGLangOptions(
        model_path=MODEL, gpus=visible_gpus()[:NUM_GPUS], memory_saver=True, random_seed=1,
        args={"mem_fraction_static": 0.5, "attention_backend": ATTENTION},
    )  # fmt: skip
    with start_sglang(options) as process:
        process.wait_ready(START_SECONDS)
        processes = psutil.Process(process.pid).children(recursive=True)
        yield process
    # A container's first process may not collect orphans that have ended.
    left = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left, "the engine left processes behind"


@pytest.fixture
def call(engine: EngineProcess) -> Call:
    def run(function: Callable[[EngineClient], Any]) -> Any:
        async def inside() -> Any:
            async with EngineClient(engine.url, engine.name) as client:
                return await function(client)

        return asyncio.run(inside())

    run(lambda client: client.update_weights_from_disk(MODEL, 0))
    return run


@pytest.fixture
def fleet(engine: EngineProcess) -> Iterator[Fleet]:
    class Kept:
        """The module's engine: a fleet that ends leaves it running."""

        name, kind, url, api_key = engine.name, engine.kind, engine.url, engine.api_key

        def raise_if_dead(self) -> None:
            engine.raise_if_dead()

        def stop(self, grace_seconds: float | None = None) -> None:
            return None

    fleet = Fleet([Kept()], LoopThread(), FleetOptions(health_interval=1.0))
    fleet.start()
    yield fleet
    fleet.stop()
    fleet.loop.stop()


def test_the_flags_of_the_installed_version_can_be_read() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    root = os.path.dirname(list(spec.submodule_search_locations)[0])
    with open(os.path.join(root, SOURCE), encoding="utf-8") as file:
        assert "mem-fraction-static" in {flag.name for flag in read_flags(file.read())}


def test_answers_become_tokens_of_samples(call: Call) -> None:
    params = [GREEDY | {"max_new_tokens": n, "min_new_tokens": 1} for n in (4, 8)]
    answers = call(lambda c: c.generate([PROMPT, PROMPT[:9]], params, rid=["a", "b"]))
    assert [a["meta_info"]["id"] for a in answers] == ["a", "b"]
    for answer, prompt, count in zip(answers, (PROMPT, PROMPT[:9]), (4, 8), strict=True):
        sample = Sample(tokens=np.array(prompt, np.int32))
        append_output(Namespace(), sample, answer)
        sample.validate()
        assert sample.response_length == count and sample.weight_versions == ["0"]
        assert sample.status is Sample.Status.TRUNCATED and isinstance(answer["text"], str)


def test_a_parameter_out_of_range_is_refused(call: Call) -> None:
    with pytest.raises(InvalidField, match="top_p"):
        call(lambda c: c.generate(PROMPT, {"top_p": 2}))


def test_control_calls_answer(call: Call) -> None:
    call(lambda c: c.abort("nobody"))
    call(lambda c: c.flush_cache(5.0))
    info = call(lambda c: c.server_info())
    assert info["enable_memory_saver"] is True and info["weight_version"] == "0"


def test_an_aborted_request_answers_with_what_it_has(call: Call) -> None:
    async def scenario(client: EngineClient) -> dict[str, Any]:
        long = GREEDY | {"max_new_tokens": 4000}
        request = asyncio.ensure_future(client.generate(PROMPT, long, rid="long"))
        done: set[Any] = set()
        while not done:
            done, _ = await asyncio.wait({request}, timeout=0.3)
            await client.abort("long")
        return await request

    answer = call(scenario)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["meta_info"]["output_token_logprobs"]) < 4000


def test_the_weights_checker_passes_after_an_update_of_all(call: Call) -> None:
    first = call(lambda c: c.check_weights())["per_engine_checksum"]
    call(lambda c: c.check_weights("snapshot"))
    call(lambda c: c.check_weights("reset_tensors"))
    with pytest.raises(InvalidField, match="check tensor equality failed"):
        call(lambda c: c.check_weights("compare"))
    call(lambda c: c.update_weights_from_disk(MODEL, 3))
    assert call(lambda c: c.check_weights("compare"))["success"] is True
    assert call(lambda c: c.check_weights())["per_engine_checksum"] == first
    assert call(lambda c: c.weight_version()) == "3"


def test_a_colocated_step(call: Call, fleet: Fleet) -> None:
    updates = EngineWeights(fleet, wait_seconds=60)
    before = call(lambda c: c.generate(PROMPT, GREEDY))["output_ids"]

    async def step() -> None:
        await updates.offload([])
        with pytest.raises(WrongState):
            await fleet.generate([PROMPT], [GREEDY])
        await asyncio.sleep(2.5)  # two probes of a held engine
        await updates.onload(["weights"])
        await updates.begin(9)
        await fleet.members[0].client.update_weights_from_disk(MODEL, 9)
        await updates.onload([])
        await updates.commit(9)

    fleet.loop.run(step(), timeout=120)
    answer = fleet.loop.run(fleet.generate([PROMPT], [GREEDY]), timeout=60)[0]
    # A prefix that was cached before, and is not now, may round the later tokens another way.
    assert answer["output_ids"][:4] == before[:4] and answer["meta_info"]["weight_version"] == "9"
    assert fleet.error is None
