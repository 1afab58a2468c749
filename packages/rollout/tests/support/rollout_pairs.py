"""Engines in pairs, as processes that do what SGLang's protocol asks of prefill and decode, and requests to them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import sglang_pairs

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.process import EngineProcess, start_all
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.fleet.fleet import Fleet, PairInFlight
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.restarts import RestartLimits
from slime.rollout.fleet.router_address import RouterAddress
from slime.rollout.fleet.watched import FleetOptions

SERVER = (sys.executable, sglang_pairs.__file__)
KEY = "the-key-of-all-engines"
PARAMS = {"max_new_tokens": 16}
PARTS = (("p0", "p1"), ("d0", "d1"))
# The longest prompt that engines which decode accept.
LONGEST = 8


def start(stage: str, name: str) -> EngineProcess:
    args = {"context_length": LONGEST} if stage == "decode" else {}
    options = SGLangOptions(
        model_path="m", gpus=[], stage=stage, server=SERVER, args={"disaggregation_transfer_backend": "nixl"} | args
    )
    return start_sglang(options, name=name, api_key=KEY)


def open_pairs() -> Iterator[Fleet]:
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


def remote(fleet: Fleet, *names: str) -> list[RemoteEngine]:
    """Returns engines of a fleet as engines that another run has not started."""
    return [RemoteEngine(name, member(fleet, name).url, api_key=KEY) for name in names]


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


async def in_pair(fleet: Fleet) -> PairInFlight:
    """Returns the pair of the only request."""
    await until(lambda: fleet._pairs)
    (pair,) = fleet._pairs
    return pair


async def aborted(fleet: Fleet, request: asyncio.Task[Any], rids: list[str] | None) -> dict[str, Any]:
    """Returns the answer to a request that is held, and aborted."""
    while not request.done():
        # An abort that overtakes its request finds nothing to end.
        await fleet.abort(rids)
        await asyncio.sleep(0.05)
    (output,) = await request
    assert output["meta_info"]["finish_reason"]["type"] == "abort"
    return output
