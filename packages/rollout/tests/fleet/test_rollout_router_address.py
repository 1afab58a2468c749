"""The router's HTTP address over real embedded engines: what plug-ins send there is routed, counted and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rollout_tiny_model import write_tiny_model

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.keys import engine_headers
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.restarts import RestartLimits
from slime.rollout.fleet.router_address import RouterAddress, _samples
from slime.rollout.fleet.watched import FleetOptions
from slime.utils.http_utils import get, post

LONG: dict[str, Any] = {"max_new_tokens": 400, "ignore_eos": True}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), context=2048)


def opened(directory: Path) -> Iterator[Fleet]:
    options = EmbeddedOptions(model_path=str(directory), threads=1)
    processes = [start_embedded(options, name=f"embedded-{i}") for i in range(2)]
    loop = LoopThread()
    fleet = Fleet(
        [process.wait_ready(120) for process in processes], loop, FleetOptions(restarts=RestartLimits(1, 60, 60))
    )
    fleet.start()
    loop.run(RouterAddress(fleet, "127.0.0.1").start(), timeout=30)
    yield fleet
    fleet.stop(0)
    loop.stop()


@pytest.fixture(scope="module")
def fleet(directory: Path) -> Iterator[Fleet]:
    yield from opened(directory)


def url(fleet: Fleet, path: str) -> str:
    assert fleet.address is not None
    return fleet.address.url + path


def done(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


async def in_flight(fleet: Fleet, count: int) -> None:
    while fleet.router.in_flight != count:
        await asyncio.sleep(0.01)


def request(*ids: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": list(ids), "return_logprob": True, "sampling_params": GREEDY} | more


def test_requests_are_answered_as_by_an_engine_and_spread_over_all(fleet: Fleet) -> None:
    async def both() -> None:
        body = request(3, 4, 5)
        routed = await post(url(fleet, "/generate"), body)
        direct = await post(f"{fleet.members[0].url}/generate", body)
        assert routed["output_ids"] == direct["output_ids"]
        calls = [
            asyncio.create_task(post(url(fleet, "/generate"), request(3, sampling_params=LONG, rid=f"spread-{i}")))
            for i in range(4)
        ]
        await in_flight(fleet, 4)
        assert [fleet.router.load_of(member) for member in fleet.members] == [2, 2]
        assert {len(answer["output_ids"]) for answer in await asyncio.gather(*calls)} == {400}

    done(both())
    assert fleet.router.in_flight == 0


def test_a_request_of_several_sequences_counts_as_many_samples(fleet: Fleet) -> None:
    async def ask() -> None:
        body = {"input_ids": [[3], [4], [5]], "sampling_params": LONG}
        call = asyncio.create_task(post(url(fleet, "/generate"), body))
        await in_flight(fleet, 3)
        assert len(await call) == 3

    done(ask())


def test_requests_wait_while_weights_are_updated(fleet: Fleet) -> None:
    async def ask() -> None:
        await fleet.loop.bridge(fleet.router.shut("an update"))
        call = asyncio.create_task(post(url(fleet, "/generate"), request(3)))
        while not fleet.router._waiters:
            await asyncio.sleep(0.01)
        assert fleet.router.in_flight == 0
        await fleet.loop.bridge(fleet.router.open())
        assert len((await call)["output_ids"]) == 8

    done(ask())


@pytest.mark.parametrize("abort", [{"abort_all": True}, {"rid": "mine"}])
def test_an_abort_ends_a_request_with_its_tokens_so_far(fleet: Fleet, abort: dict[str, Any]) -> None:
    async def ask() -> Any:
        call = asyncio.create_task(
            post(url(fleet, "/generate"), request(3, rid="mine", sampling_params=LONG | {"max_new_tokens": 1900}))
        )
        await in_flight(fleet, 1)
        while not call.done():
            # Repeated, because an abort that overtakes its request finds nothing to end.
            await post(url(fleet, "/abort_request"), abort)
            await asyncio.wait({call}, timeout=0.2)
        return await call

    answer = done(ask())
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and len(answer["output_ids"]) < 1900


def test_a_stream_arrives_piece_by_piece(fleet: Fleet) -> None:
    async def ask() -> list[int]:
        body = request(3, stream=True, sampling_params=LONG)
        lengths = []
        async with aiohttp.ClientSession(headers=engine_headers(url(fleet, ""))) as session:
            async with session.post(url(fleet, "/generate"), json=body) as answer:
                assert answer.content_type == "text/event-stream"
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        lengths.append(len(json.loads(line[6:])["output_ids"]))
        return lengths

    lengths = done(ask())
    assert len(lengths) > 2 and lengths == sorted(lengths) and lengths[-1] == 400


def test_the_engines_are_listed_as_by_sglangs_router(fleet: Fleet) -> None:
    urls = [member.url for member in fleet.members]
    assert done(get(url(fleet, "/list_workers"))) == {"urls": urls}
    assert [worker["url"] for worker in done(get(url(fleet, "/workers")))["workers"]] == urls
    assert "weight_version" in done(get(url(fleet, "/model_info")))


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/update_weights_from_disk", 404, "the router serves no POST /update_weights_from_disk"),
        ("POST", "/pause_generation", 404, "serves no POST"),
        ("GET", "/flush_cache", 404, "serves no GET"),
        ("POST", "/generate", 400, "input_ids"),
    ],
)
def test_what_an_engine_refuses_or_what_would_change_it_is_refused(
    fleet: Fleet, method: str, path: str, status: int, words: str
) -> None:
    async def ask() -> tuple[int, str]:
        async with aiohttp.ClientSession(headers=engine_headers(url(fleet, ""))) as session:
            body = {"input_ids": "no list", "sampling_params": {}} if method == "POST" else None
            async with session.request(method, url(fleet, path), json=body) as answer:
                return answer.status, await answer.text()

    found, text = done(ask())
    assert found == status and words in text


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": 7}, {"rid": []}, {"abort_all": False}])
def test_an_abort_that_names_no_request_ends_none(fleet: Fleet, body: dict[str, Any]) -> None:
    async def ask() -> tuple[int, str, int]:
        call = asyncio.create_task(post(url(fleet, "/generate"), request(3, sampling_params=LONG)))
        await in_flight(fleet, 1)
        async with aiohttp.ClientSession(headers=engine_headers(url(fleet, ""))) as session:
            async with session.post(url(fleet, "/abort_request"), json=body) as answer:
                return answer.status, await answer.text(), len((await call)["output_ids"])

    status, text, tokens = done(ask())
    assert (status, tokens) == (400, 400) and "rid" in text


@pytest.mark.parametrize(
    ("body", "samples"),
    [
        ({"input_ids": [3, 4]}, 1),
        ({"input_ids": [[3], [4]], "sampling_params": {"n": 3}}, 6),
        ({"text": ["a", "b"]}, 2),
        ({"messages": [], "n": 2}, 2),
        ({"input_ids": []}, 1),
        ({"input_ids": [3], "sampling_params": {"n": -5}}, 1),
        ({"input_ids": [3], "sampling_params": {"n": True}}, 1),
        ({"input_ids": [3], "sampling_params": None}, 1),
    ],
)
def test_a_request_counts_as_the_sequences_that_it_asks_for(body: dict[str, Any], samples: int) -> None:
    assert _samples(body) == samples


def test_nobody_is_answered_without_the_key(fleet: Fleet) -> None:
    async def ask() -> int:
        async with aiohttp.ClientSession() as session:
            async with session.post(url(fleet, "/generate"), json=request(3)) as answer:
                return answer.status

    assert done(ask()) == 401


def test_requests_of_an_engine_that_is_killed_are_answered_by_another(directory: Path) -> None:
    engines = opened(directory)
    fleet = next(engines)

    async def ask() -> list[Any]:
        calls = [
            asyncio.create_task(post(url(fleet, "/generate"), request(3, sampling_params=LONG), max_retries=1))
            for _ in range(4)
        ]
        await in_flight(fleet, 4)
        os.kill(fleet.members[0].engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return list(await asyncio.gather(*calls))

    try:
        assert [len(answer["output_ids"]) for answer in done(ask())] == [400] * 4
        assert fleet.num_lost == 1
    finally:
        list(engines)
