"""Places at engines are given in order, and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout.engines.kind import DECODE, PREFILL
from slime.rollout.fleet.router import Router, Withdrawn
from slime.types.errors import EngineError, WrongState

ENGINES = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Requests:
    """Requests that hold their places until they are told to leave; `order` is how they were admitted."""

    def __init__(self, router: Router[Any]) -> None:
        self.router = router
        self.order: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}

    def start(self, name: str, samples: int = 1, **options: Any) -> asyncio.Task[None]:
        self._leave[name] = asyncio.Event()
        return asyncio.create_task(self._hold(name, samples, options))

    async def _hold(self, name: str, samples: int, options: dict[str, Any]) -> None:
        async with self.router.admit(samples, keys=[name], **options):
            self.order.append(name)
            await self._leave[name].wait()

    async def end(self, name: str) -> None:
        self._leave[name].set()
        await settle()


def test_places_are_given_in_the_order_of_arrival() -> None:
    async def scenario() -> None:
        requests = Requests(Router(ENGINES[:1], concurrency=2))
        for name, samples in (("one", 2), ("two", 2), ("three", 1), ("four", 1)):
            requests.start(name, samples)
        await settle()
        assert requests.order == ["one"]
        await requests.end("one")
        assert requests.order == ["one", "two"]
        await requests.end("two")
        assert requests.order == ["one", "two", "three", "four"]

    run(scenario())


def test_a_request_for_a_full_engine_does_not_hold_up_others() -> None:
    async def scenario() -> None:
        requests = Requests(Router(ENGINES, concurrency=1))
        requests.start("on a", engine=ENGINES[0])
        requests.start("also on a", engine=ENGINES[0])
        requests.start("anywhere")
        await settle()
        assert requests.order == ["on a", "anywhere"]

    run(scenario())


def test_a_waiting_request_is_withdrawn_by_its_keys() -> None:
    async def scenario() -> None:
        router: Router[Any] = Router(ENGINES[:1], concurrency=1)
        requests = Requests(router)
        first, second, third = (requests.start(name) for name in ("first", "second", "third"))
        await settle()
        router.withdraw(["second", "first", "unknown"])
        with pytest.raises(Withdrawn):
            await second
        assert not first.done()
        await requests.end("first")
        assert requests.order == ["first", "third"]
        await requests.end("third")
        await third
        assert router.in_flight == 0

    run(scenario())


def test_a_cancelled_request_leaves_no_place_taken() -> None:
    async def scenario() -> None:
        router: Router[Any] = Router(ENGINES[:1], concurrency=1)
        requests = Requests(router)
        requests.start("first")
        waiting, given = requests.start("waiting"), requests.start("given")
        await settle()
        waiting.cancel()
        requests._leave["first"].set()
        await settle()
        assert requests.order == ["first", "given"]
        given.cancel()
        await settle()
        assert router.in_flight == 0
        async with router.admit():
            assert router.in_flight == 1

    run(scenario())


def test_a_place_that_was_given_to_a_request_being_cancelled_goes_to_the_next() -> None:
    async def scenario() -> None:
        router: Router[Any] = Router(ENGINES[:1], concurrency=1)
        requests = Requests(router)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(router.admit())
            late, after = requests.start("late"), requests.start("after")
            await settle()
        late.cancel()  # its place is given, and it has not run since
        await settle()
        assert requests.order == ["after"] and router.in_flight == 1
        await requests.end("after")
        await after

    run(scenario())


def test_each_engine_has_a_limit_of_its_own_and_a_grown_one_is_filled() -> None:
    async def scenario() -> None:
        limits = {"a": 1, "b": 3}
        router: Router[Any] = Router(ENGINES, lambda engine: limits[engine.name])
        requests = Requests(router)
        for number in range(6):
            requests.start(str(number))
        await settle()
        assert [router.load_of(engine) for engine in ENGINES] == [1, 3]
        assert router.take_held_back(ENGINES[0]) and not router.take_held_back(ENGINES[0])
        limits["a"] = 2
        router.refill()
        await settle()
        assert [router.load_of(engine) for engine in ENGINES] == [2, 3]
        limits["b"] = 1
        await requests.end("1")
        await requests.end("2")
        await requests.end("3")
        assert [router.load_of(engine) for engine in ENGINES] == [2, 1], "a smaller limit takes effect as requests end"

    run(scenario())


def test_a_shut_gate_keeps_or_refuses_and_a_failure_reaches_all() -> None:
    async def scenario() -> None:
        router: Router[Any] = Router(ENGINES, concurrency=1)
        requests = Requests(router)
        await router.shut("new weights")
        waiting = requests.start("waiting")
        await settle()
        assert not requests.order
        await router.shut("no weights", refuse=True)
        with pytest.raises(WrongState, match="no weights"):
            await waiting
        await router.open()
        requests.start("running")
        await settle()
        assert requests.order == ["running"]
        await router.shut("new weights")
        waiting = requests.start("waiting again")
        await settle()
        await router.fail(EngineError("engine a is gone"))
        with pytest.raises(EngineError, match="is gone"):
            await waiting
        with pytest.raises(EngineError, match="is gone"):
            await router.drain(5)

    run(scenario())


def pairs() -> tuple[Router[Any], list[Any]]:
    engines = [SimpleNamespace(name=name) for name in ("p0", "p1", "d0")]
    router: Router[Any] = Router(engines, 10, lambda engine: PREFILL if engine.name[0] == "p" else DECODE)
    router.in_pairs = True
    return router, engines


def test_a_sample_counts_once_and_is_a_load_of_its_helper_until_prefill_is_done() -> None:
    async def scenario() -> None:
        router, (p0, p1, d0) = pairs()
        async with router.admit(3) as chosen:
            assert chosen is d0 and router.take_helper(3) is p0 and router.take_helper(1) is p1
            assert [router.load_of(each) for each in (p0, p1, d0)] == [3, 1, 3] and router.in_flight == 3
            router.give_back(p0, 3)
            assert router.load_of(p0) == 0 and router.take_helper(1) is p0
        assert router.in_flight == 0

    run(scenario())


def test_a_session_keeps_the_engine_that_has_its_prompts() -> None:
    async def scenario() -> None:
        router, (p0, p1, d0) = pairs()
        assert router.take_helper(1, "s") is p0 and router.take_helper(5, "t") is p1
        async with router.admit(1, "s") as chosen:
            assert chosen is d0
        for _ in range(8):
            assert router.take_helper(1, "s") is p0
        router.take_out(p0, awaited=True)
        assert router.take_helper(1, "s") is p1
        router.take_out(p1, awaited=True)
        assert router.in_rotation == [d0] and not router.can_admit
        router.put_back(p0)
        assert router.can_admit

    run(scenario())


def test_a_session_of_an_engine_without_helpers_goes_to_one_that_does_both() -> None:
    """Else its request would be admitted again and again by an engine that cannot serve it."""

    async def scenario() -> None:
        engines = [SimpleNamespace(name=name) for name in ("p0", "d0", "both")]
        stages = {"p": PREFILL, "d": DECODE, "b": ""}
        router: Router[Any] = Router(engines, 10, lambda engine: stages[engine.name[0]])
        router.in_pairs = True
        p0, d0, both = engines
        async with router.admit(1, "s") as chosen:
            assert chosen is d0
        router.take_out(p0, awaited=True)
        async with router.admit(1, "s") as chosen:
            assert chosen is both

    run(scenario())
