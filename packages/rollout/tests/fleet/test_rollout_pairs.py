"""Engines in pairs, as processes that do what SGLang's protocol asks of prefill and decode: requests, aborts, weight
updates, and losses."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import sglang_recording
from sglang_recording import HOLD, HOLD_PREFILL

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.keys import new_key
from slime.rollout.engines.process import EngineProcess, start_all
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.fleet import INTERRUPTED, Fleet
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.restarts import RestartLimits
from slime.rollout.fleet.router_address import RouterAddress
from slime.rollout.fleet.watched import FleetOptions
from slime.rollout.launch import check_abilities
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidField, InvalidSetting
from slime.utils.http_utils import post

SERVER = (sys.executable, sglang_recording.__file__)
PARAMS = {"max_new_tokens": 16}


def start(stage: str, name: str) -> EngineProcess:
    options = SGLangOptions(model_path="m", gpus=[], stage=stage, server=SERVER)
    return start_sglang(options, name=name, api_key=new_key())


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Two engines that do prefill, and two that decode."""
    names = [("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"), ("decode", "d1")]
    engines = start_all([lambda each=each: start(*each) for each in names], 120)  # type: ignore[misc]
    loop = LoopThread()
    made = Fleet(engines, loop, FleetOptions(restarts=RestartLimits(3, 600, 120)))
    made.start()
    loop.run(RouterAddress(made, "127.0.0.1").start(), timeout=30)
    yield made
    made.stop(0)
    loop.stop()


def member(fleet: Fleet, name: str) -> Member:
    return next(each for each in fleet.members if each.name == name)


def done(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def bodies(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    async def ask() -> Any:
        engine = member(fleet, name).engine
        async with EngineClient(engine.url, name, api_key=engine.api_key) as client:
            return await client.get("/calls")

    return asyncio.run(ask())["bodies"]


def answered(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


async def ask(fleet: Fleet, *prompts: list[int], rid: str = "r", **more: Any) -> Any:
    rids = [f"{rid}-{i}" for i in range(len(prompts))]
    return await fleet.generate(list(prompts), [PARAMS] * len(prompts), rids=rids, **more)


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


@pytest.mark.parametrize("held", [HOLD, HOLD_PREFILL])
@pytest.mark.parametrize("everything", [False, True])
def test_an_abort_ends_a_request_at_both_engines(fleet: Fleet, held: int, everything: bool) -> None:
    async def aborted() -> Any:
        request = asyncio.create_task(ask(fleet, [held, 5], rid="held"))
        await until(lambda: fleet.router.in_flight == 2)
        while not request.done():
            # An abort that overtakes its request finds nothing to end.
            await fleet.abort(None if everything else ["held-0"])
            await asyncio.sleep(0.05)
        return await request

    (output,) = done(aborted())
    assert output["meta_info"]["finish_reason"]["type"] == "abort"
    assert fleet.router.in_flight == 0 and fleet.error is None
    assert answered(done(ask(fleet, [5, 6], rid="next"))) == [[6, 5, 1]]


def test_a_weight_update_holds_both_and_is_for_both(fleet: Fleet) -> None:
    weights = EngineWeights(fleet, 60.0)

    async def update() -> list[str]:
        request = asyncio.create_task(ask(fleet, [HOLD, 5], rid="held"))
        await until(lambda: fleet.router.in_flight == 2)
        members = await weights.begin(1, interrupt=True)
        (output,) = await request
        assert output["meta_info"]["finish_reason"] == {"type": INTERRUPTED}
        for each in members:
            await each.client.update_weights_from_disk(os.getcwd(), 1)
        await weights.commit(1)
        return [each.name for each in members]

    assert fleet.loop.run(update(), timeout=120) == ["p0", "p1", "d0", "d1"]
    (output,) = done(ask(fleet, [5, 6]))
    assert output["meta_info"]["weight_version"] == "1"


@pytest.mark.parametrize("lost, held", [("d", HOLD), ("d", HOLD_PREFILL), ("p", HOLD_PREFILL)])
def test_a_request_goes_on_when_an_engine_of_its_pair_dies(fleet: Fleet, lost: str, held: int) -> None:
    fleet.weights_as_started = False  # the lost engine has to wait for weights

    async def lose_one() -> Any:
        request = asyncio.create_task(ask(fleet, [held, 5], rid="held"))
        await until(lambda: fleet.router.in_flight == 2)
        busy = next(each for each in fleet.members if each.name[0] == lost and fleet.router.load_of(each))
        await until(lambda: any(body["rid"] == ["held-0"] for body in bodies_of(busy)))
        os.kill(busy.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        other = next(each for each in fleet.members if each.name[0] == lost and each is not busy)
        await until(lambda: fleet.router.load_of(other) == 1)
        await until(lambda: not busy.out)
        # It is held at the other pair now.
        while not request.done():
            await fleet.abort(["held-0"])
            await asyncio.sleep(0.05)
        return busy, other

    def bodies_of(each: Member) -> list[dict[str, Any]]:
        return fleet.loop.run(each.client.get("/calls"), timeout=30)["bodies"]

    async def in_thread() -> Any:
        return await lose_one()

    busy, other = done(in_thread())
    assert fleet.num_restarts == 1 and fleet.error is None and busy.awaits_weights and not other.out
    port = busy.abilities.bootstrap_port
    assert busy.stage == ("decode" if lost == "d" else "prefill") and (lost == "d" or port)
    assert answered(done(ask(fleet, [5, 6], rid="next"))) == [[6, 5, 1]]
    assert fleet.router.in_flight == 0


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
    engines = {each.name: RemoteEngine(each.name, each.url, api_key=each.engine.api_key) for each in fleet.members}
    addresses = [engines[name].url for name in ("p0", "d0")]
    settings = RolloutSettings(hf_checkpoint="m", rollout_external_engine_addrs=addresses)
    outside = Fleet([engines["p0"], engines["d0"]], fleet.loop)
    outside.start()
    check_abilities(settings, outside)
    assert answered(done(ask(outside, [5, 6]))) == [[6, 5, 1]]
    for values, flag in (
        ({"deterministic": True}, "--deterministic"),
        ({"offload_rollout": True}, "--offload-rollout"),
    ):
        refused = RolloutSettings(hf_checkpoint="m", rollout_external_engine_addrs=addresses, **values)
        with pytest.raises(InvalidSetting, match=f"{flag} and engine p0, which does prefill cannot be used together"):
            check_abilities(refused, outside)

    # The only one of its kind cannot leave; once another has joined, it may.
    first = member(outside, "p0")
    assert not outside.may_leave(first)
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
