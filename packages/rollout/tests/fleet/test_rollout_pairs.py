"""Engines in pairs, as processes that do what SGLang's protocol asks of prefill and decode: requests, aborts, weight
updates, and losses."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from rollout_pairs import (
    LONGEST,
    PARAMS,
    PARTS,
    aborted,
    answered,
    ask,
    bodies,
    done,
    in_pair,
    member,
    open_pairs,
    remote,
    until,
)  # fmt: skip
from sglang_recording import HOLD, HOLD_PREFILL

from slime.rollout.engines import pairs
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.keys import engine_headers
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.external import ExternalEngines
from slime.rollout.fleet.fleet import INTERRUPTED, Fleet
from slime.rollout.launch import check_abilities
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidField, InvalidSetting, WrongState
from slime.utils.http_utils import post


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    yield from open_pairs()


def test_both_engines_of_a_pair_get_the_request_with_one_room(fleet: Fleet) -> None:
    assert [each.stage for each in fleet.members] == ["prefill", "prefill", "decode", "decode"]
    assert [each.name for each in fleet.answering] == ["d0", "d1"] and fleet.capacity == 2 * 512
    outputs = done(ask(fleet, [5, 6], [7, 8, 9]))
    # The recording of decode answers only with what that of prefill has handed over.
    assert answered(outputs) == [[6, 5, 1], [9, 8, 7, 1]]
    assert [len(output["meta_info"]["output_token_logprobs"]) for output in outputs] == [3, 4]

    async def many() -> list[Any]:
        return await asyncio.gather(*(ask(fleet, [5, i], rid=f"many-{i}") for i in range(6, 26)))

    assert [answered(each) for each in done(many())] == [[[i, 5, 1]] for i in range(6, 26)]
    first, second = ([*bodies(fleet, f"{part}0"), *bodies(fleet, f"{part}1")] for part in "pd")
    assert len(first) == len(second) == 21
    fields = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "input_ids", "rid")
    assert sorted(str([body[key] for key in fields]) for body in first) == sorted(
        str([body[key] for key in fields]) for body in second
    )
    # Both share the load, on either side.
    assert all(bodies(fleet, name) for name in ("p0", "p1", "d0", "d1"))
    ports = {name: member(fleet, name).abilities.bootstrap_port for name in ("p0", "p1")}
    assert all(body["bootstrap_port"] == ports[name] for name in ports for body in bodies(fleet, name))
    assert fleet.router.in_flight == 0


def test_plug_ins_reach_pairs_through_the_router(fleet: Fleet) -> None:
    assert fleet.address is not None
    url = fleet.address.url
    body = {"input_ids": [5, 6], "sampling_params": PARAMS, "return_logprob": True, "logprob_start_len": 0}
    answer = done(post(f"{url}/generate", body))
    assert answer["output_ids"] == [6, 5, 1]
    # The log-probs of the prompt are those of the engine that has seen it.
    assert answer["meta_info"]["input_token_logprobs"] == [[-0.25, 5, None], [-0.25, 6, None]]
    several = done(post(f"{url}/generate", body | {"input_ids": [[5, 6], [7, 8]]}))
    assert answered(several) == [[6, 5, 1], [8, 7, 1]]
    assert [len(each["meta_info"]["input_token_logprobs"]) for each in several] == [2, 2]
    # By these ids a request is ended at one engine when the other fails.
    first, second = ([body["rid"] for name in names for body in bodies(fleet, name)] for names in PARTS)
    assert sorted(map(len, first)) == [2, 32] and sorted(map(str, first)) == sorted(map(str, second))


def test_a_session_keeps_the_engine_that_does_its_prefill(fleet: Fleet) -> None:
    async def turns() -> None:
        await ask(fleet, [5, 6], rid="first", session_id="s")
        busy = asyncio.create_task(ask(fleet, [HOLD_PREFILL, 5], rid="held"))
        await in_pair(fleet)
        # It is the busy one; a request without a session gets the other.
        await ask(fleet, [5, 6, 7], rid="second", session_id="s")
        await ask(fleet, [5, 6], rid="third")
        await aborted(fleet, busy, ["held-0"])

    done(turns())
    did = {name: {rid for body in bodies(fleet, name) for rid in body["rid"]} for name in PARTS[0]}
    assert did == {"p0": {"first-0", "held-0", "second-0"}, "p1": {"third-0"}}


@pytest.mark.parametrize("held", [HOLD, HOLD_PREFILL])
@pytest.mark.parametrize("everything", [False, True])
def test_an_abort_ends_a_request_at_both_engines(fleet: Fleet, held: int, everything: bool) -> None:
    async def work() -> None:
        request = asyncio.create_task(ask(fleet, [held, 5], rid="held"))
        await in_pair(fleet)
        await aborted(fleet, request, None if everything else ["held-0"])

    done(work())
    assert fleet.router.in_flight == 0 and fleet.error is None
    assert answered(done(ask(fleet, [5, 6], rid="next"))) == [[6, 5, 1]]


def test_a_weight_update_holds_both_and_is_for_both(fleet: Fleet) -> None:
    weights = EngineWeights(fleet, 60.0)

    async def update() -> list[str]:
        seen: list[dict[str, Any]] = []
        request = asyncio.create_task(ask(fleet, [HOLD, 5], rid="held", on_output=seen.append))
        # Not for the end of prefill, of which this process may hear before the engine that decodes has the keys.
        await until(lambda: seen)
        members = await weights.begin(1, interrupt=True)
        (output,) = await request
        assert output["output_ids"] == [5] and output["meta_info"]["finish_reason"] == {"type": INTERRUPTED}
        for each in members:
            await each.client.update_weights_from_disk(os.getcwd(), 1)
        await weights.commit(1)
        return [each.name for each in members]

    assert fleet.loop.run(update(), timeout=120) == ["p0", "p1", "d0", "d1"]
    (output,) = done(ask(fleet, [5, 6]))
    assert output["meta_info"]["weight_version"] == "1"


def test_a_request_that_a_weight_update_ends_before_it_is_handed_over_waits_for_the_commit(fleet: Fleet) -> None:
    weights = EngineWeights(fleet, 60.0)

    async def update() -> dict[str, Any]:
        request = asyncio.create_task(ask(fleet, [HOLD_PREFILL, 5], rid="held"))
        await in_pair(fleet)
        members = await weights.begin(1, interrupt=True)
        # It has no tokens that its caller could go on from.
        assert not request.done() and fleet.router._waiters and not fleet._pairs
        for each in members:
            await each.client.update_weights_from_disk(os.getcwd(), 1)
        await weights.commit(1)
        await in_pair(fleet)
        return await aborted(fleet, request, ["held-0"])

    assert fleet.loop.run(update(), timeout=120)["output_ids"] == []
    assert fleet.router.in_flight == 0 and fleet.error is None


def test_requests_wait_while_no_engine_does_prefill(fleet: Fleet) -> None:
    async def wait_for_prefill() -> Any:
        for name in ("p0", "p1"):
            fleet.router.take_out(member(fleet, name), awaited=False)
        request = asyncio.create_task(ask(fleet, [5, 6]))
        await until(lambda: fleet.router._waiters)
        assert fleet.router.in_flight == 0
        fleet.router.put_back(member(fleet, "p1"))
        return await request

    assert answered(fleet.loop.run(wait_for_prefill(), timeout=120)) == [[6, 5, 1]]


def test_engines_from_outside_the_run_are_pairs_too(fleet: Fleet) -> None:
    engines = {each.name: each for each in remote(fleet, "p0", "p1", "d0", "d1")}
    addresses = [engines[name].url for name in ("p0", "d0")]
    settings = RolloutSettings(hf_checkpoint="m", rollout_external_engine_addrs=addresses)
    outside = Fleet([engines["p0"], engines["d0"]], fleet.loop)
    outside.start()
    check_abilities(settings, outside)
    assert answered(done(ask(outside, [5, 6]))) == [[6, 5, 1]]
    for values, message in (
        ({"deterministic": True}, "--deterministic and engine p0, which does prefill cannot be used together"),
        ({"offload_rollout": True}, "--offload-rollout and disaggregation_transfer_backend nixl in engine p0, which d"),
    ):
        refused = RolloutSettings(hf_checkpoint="m", rollout_external_engine_addrs=addresses, **values)
        with pytest.raises(InvalidSetting, match=message):
            check_abilities(refused, outside)

    # The only one of its kind cannot leave; once another has joined, it may.
    first = member(outside, "p0")
    assert not outside.may_leave(first)
    external = ExternalEngines(EngineWeights(outside, 60.0), None, lambda member: None)
    for url, part in zip(addresses, ("prefill", "decode"), strict=True):
        with pytest.raises(WrongState, match=f"the only one that does {part}"):
            fleet.loop.run(external.remove(url), timeout=60)
    fleet.loop.run(join(outside, engines["p1"]), timeout=60)
    assert outside.may_leave(first) and not outside.may_leave(member(outside, "d0"))
    fleet.loop.run(outside.leave(first), timeout=60)
    assert answered(done(ask(outside, [5, 6], rid="next"))) == [[6, 5, 1]]

    alone = Fleet([engines["d1"]], fleet.loop)
    alone.start()
    with pytest.raises(InvalidSetting, match="engines that do prefill and engines that decode.*d1 does decode"):
        check_abilities(settings, alone)
    for each in (outside, alone):
        each.stop(0)


async def join(fleet: Fleet, engine: RemoteEngine) -> None:
    joining = fleet.connect(engine)
    await joining.learn_in_time()
    fleet.join(joining)
    fleet.router.put_back(joining)


def test_what_an_engine_refuses_is_refused(fleet: Fleet) -> None:
    async def refused() -> None:
        with pytest.raises(InvalidField, match="top_p must be in"):
            await fleet.generate([[5, 6]], [{"top_p": 2.0}], rids=["refused"])

    done(refused())
    assert fleet.router.in_flight == 0


def test_what_only_the_engine_that_decodes_refuses_is_refused_at_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has done its part, and waits to hand it over."""
    # A wait for the other engine's error would outlast this test.
    monkeypatch.setattr(pairs, "BLAME_SECONDS", 600.0)
    prompt, words = [5] * (LONGEST + 1), "is longer than the model's context length"

    async def refused() -> tuple[int, str]:
        with pytest.raises(InvalidField, match=words):
            await ask(fleet, prompt)
        assert fleet.address is not None
        url = fleet.address.url
        async with aiohttp.ClientSession(headers=engine_headers(url)) as session:
            async with session.post(f"{url}/generate", json={"input_ids": prompt, "sampling_params": {}}) as answer:
                return answer.status, await answer.text()

    status, text = done(refused())
    assert status == 400 and words in text
    assert answered(done(ask(fleet, [5, 6]))) == [[6, 5, 1]]
    assert fleet.router.in_flight == 0 and not any(map(fleet.router.load_of, fleet.members))
