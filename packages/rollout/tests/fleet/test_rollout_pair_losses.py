"""Pairs of engines of which one dies, leaves, or loses its connection: requests go on, and end as they should."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rollout_pairs import (
    KEY,
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
from rollout_tiny_model import write_tiny_model
from sglang_pairs import DROP
from sglang_recording import HOLD, HOLD_PREFILL

from slime.rollout.engines.base import RemoteEngine
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.fleet import INTERRUPTED, Fleet
from slime.rollout.fleet.member import Member
from slime.rollout.launch import check_abilities, open_state
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import DeadlineExceeded, InvalidSetting
from slime.utils.http_utils import post


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    yield from open_pairs()


def kill(lost: Member) -> None:
    os.kill(lost.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]


def other_of(fleet: Fleet, busy: Member) -> Member:
    return next(each for each in fleet.members if each.stage == busy.stage and each is not busy)


@pytest.mark.parametrize("lost, held", [("d", HOLD), ("d", HOLD_PREFILL), ("p", HOLD_PREFILL)])
def test_a_request_goes_on_when_an_engine_of_its_pair_dies(fleet: Fleet, lost: str, held: int) -> None:
    fleet.weights_as_started = False  # the lost engine has to wait for weights

    async def lose_one() -> Any:
        request = asyncio.create_task(ask(fleet, [held, 5], rid="held"))
        pair = await in_pair(fleet)
        busy = pair.member if lost == "d" else pair.helper
        await until(lambda: pair.prefilled or held == HOLD_PREFILL)
        await until(lambda: any(body["rid"] == ["held-0"] for body in bodies_of(busy)))
        kill(busy)
        other = other_of(fleet, busy)
        await until(lambda: fleet.router.load_of(other) == 1)
        await until(lambda: not busy.out)
        # It is held at the other pair now.
        await aborted(fleet, request, ["held-0"])
        return busy, other

    def bodies_of(each: Member) -> list[dict[str, Any]]:
        return fleet.loop.run(each.client.get("/calls"), timeout=30)["bodies"]

    busy, other = done(lose_one())
    assert fleet.num_restarts == 1 and fleet.error is None and busy.awaits_weights and not other.out
    port = busy.abilities.bootstrap_port
    assert busy.stage == ("decode" if lost == "d" else "prefill") and (lost == "d" or port)
    assert answered(done(ask(fleet, [5, 6], rid="next"))) == [[6, 5, 1]]
    assert fleet.router.in_flight == 0


def test_a_request_that_was_handed_over_is_no_longer_its_prefill_engines(fleet: Fleet) -> None:
    async def hand_over() -> None:
        request = asyncio.create_task(ask(fleet, [HOLD, 5], rid="held"))
        pair = await in_pair(fleet)
        await until(lambda: pair.prefilled)
        assert fleet.router.in_flight == 1
        assert (fleet.router.load_of(pair.helper), fleet.router.load_of(pair.member)) == (0, 1)
        fleet.router.take_out(pair.helper, awaited=False)
        # It has nothing to wait for.
        await asyncio.wait_for(fleet.move_away(pair.helper, 600), 60)
        assert not request.done() and not pair.aborted
        kill(pair.member)
        await until(lambda: fleet.router.load_of(other_of(fleet, pair.member)) == 1)
        await aborted(fleet, request, ["held-0"])

    fleet.loop.run(hand_over(), timeout=120)
    assert fleet.router.in_flight == 0


@pytest.mark.parametrize("leaving", ["p", "d"])
def test_a_request_goes_on_when_an_engine_of_its_pair_has_to_end_it_before_it_is_handed_over(
    fleet: Fleet, leaving: str
) -> None:
    async def move() -> None:
        request = asyncio.create_task(ask(fleet, [HOLD_PREFILL, 5], rid="held"))
        pair = await in_pair(fleet)
        gone = pair.helper if leaving == "p" else pair.member
        fleet.router.take_out(gone, awaited=False)
        await fleet.move_away(gone, 60)
        await until(lambda: fleet.router.load_of(other_of(fleet, gone)) == 1)
        assert fleet.router.load_of(gone) == 0
        await aborted(fleet, request, ["held-0"])

    fleet.loop.run(move(), timeout=120)
    assert fleet.error is None


def test_an_aborted_request_keeps_its_tokens_when_its_engine_dies(fleet: Fleet) -> None:
    async def lose_aborted() -> dict[str, Any]:
        seen: list[dict[str, Any]] = []
        request = asyncio.create_task(ask(fleet, [HOLD, 5], rid="held", on_output=seen.append))
        pair = await in_pair(fleet)
        await until(lambda: seen)
        # It never gets the abort.
        for each in psutil.Process(pair.member.engine.pid).children(recursive=True):  # type: ignore[attr-defined]
            each.suspend()
        aborting = asyncio.create_task(fleet.abort(["held-0"]))
        await until(lambda: pair.aborted)
        kill(pair.member)
        (output,) = await request
        await aborting
        return output

    output = done(lose_aborted())
    assert output["output_ids"] == [5] and output["meta_info"]["finish_reason"] == {"type": "abort"}


@pytest.mark.parametrize("over_http", [False, True])
def test_a_request_whose_connection_is_lost_is_sent_again_with_another_room(fleet: Fleet, over_http: bool) -> None:
    assert fleet.address is not None
    fleet.router.take_out(member(fleet, "d1"), awaited=False)
    body = {"input_ids": [[DROP, 5]], "sampling_params": PARAMS}
    sent = post(f"{fleet.address.url}/generate", body, max_retries=1) if over_http else ask(fleet, [DROP, 5])
    assert answered(done(sent)) == [[5, DROP, 1]]
    rooms = [body["bootstrap_room"] for body in bodies(fleet, "d0")]
    assert len(rooms) == len(set(rooms)) == 2
    assert {body["bootstrap_room"] for name in PARTS[0] for body in bodies(fleet, name)} >= {rooms[-1]}


def test_a_request_that_is_aborted_while_its_failure_is_explained_is_not_sent_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    explain, calls = fleet.explain, []

    async def abort_first(*failed: Any) -> None:
        calls.append(failed)
        if len(calls) == 1:
            await fleet.abort(["r-0"])
        await explain(*failed)

    monkeypatch.setattr(fleet, "explain", abort_first)
    (output,) = done(ask(fleet, [DROP, 5]))
    assert output["output_ids"] == [] and output["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(calls) == 1 and sum(len(bodies(fleet, name)) for name in PARTS[1]) == 1


async def give(weights: EngineWeights, members: list[Member], version: int) -> list[str]:
    for each in members:
        await each.client.update_weights_from_disk(os.getcwd(), version)
    await weights.commit(version)
    return [each.name for each in members]


async def hold_one(fleet: Fleet) -> asyncio.Task[Any]:
    """Returns a request that decodes until it is ended."""
    request = asyncio.create_task(ask(fleet, [HOLD, 5], rid="held"))
    pair = await in_pair(fleet)
    await until(lambda: pair.prefilled)
    return request


async def lose_prefill(fleet: Fleet) -> None:
    lost = [member(fleet, name) for name in PARTS[0]]
    for each in lost:
        kill(each)
    await until(lambda: all(each.awaits_weights for each in lost))


def test_engines_whose_partners_all_wait_for_weights_get_newer_ones_with_them(fleet: Fleet) -> None:
    weights = EngineWeights(fleet, 60.0)

    async def lose() -> Any:
        await give(weights, await weights.begin(1), 1)
        await lose_prefill(fleet)
        request = asyncio.create_task(ask(fleet, [5, 6]))
        # While the engines that decode serve nobody, one version must not do prefill for another.
        assert await give(weights, await weights.begin_joining(2), 2) == ["p0", "p1", "d0", "d1"]
        return await request

    (output,) = fleet.loop.run(lose(), timeout=120)
    assert output["output_ids"] == [6, 5, 1] and output["meta_info"]["weight_version"] == "2"
    assert weights.version == 2 and not any(each.awaits_weights for each in fleet.members)


def test_an_update_does_not_wait_for_the_requests_of_engines_that_are_to_get_older_weights(fleet: Fleet) -> None:
    weights = EngineWeights(fleet, 600.0)

    async def lose() -> Any:
        await give(weights, await weights.begin(1), 1)
        request = await hold_one(fleet)
        await lose_prefill(fleet)
        joining = asyncio.create_task(weights.begin_joining(2))
        await until(lambda: not fleet.router.in_rotation)
        waits = asyncio.create_task(ask(fleet, [5, 6], rid="waits"))
        members = await weights.begin(3, interrupt=True)
        (output,) = await request
        assert output["meta_info"]["finish_reason"] == {"type": INTERRUPTED}
        assert await give(weights, members, 3) == ["p0", "p1", "d0", "d1"]
        return joining, await waits

    joining, (output,) = fleet.loop.run(lose(), timeout=120)
    assert output["output_ids"] == [6, 5, 1] and output["meta_info"]["weight_version"] == "3"
    # The update came first.
    assert joining.done() and (joining.exception() is not None or joining.result() == [])
    assert weights.version == 3 and weights._joining is None
    assert len(fleet.router.in_rotation) == 4 and not any(each.awaits_weights for each in fleet.members)


def test_engines_whose_requests_do_not_end_in_time_serve_on(fleet: Fleet) -> None:
    weights = EngineWeights(fleet, 60.0)

    async def lose() -> Any:
        await give(weights, await weights.begin(1), 1)
        request = await hold_one(fleet)
        await lose_prefill(fleet)
        weights.wait_seconds = 0.1
        with pytest.raises(DeadlineExceeded, match="1 sample is still being generated"):
            await weights.begin_joining(2)
        weights.wait_seconds = 60.0
        assert [each.name for each in fleet.router.in_rotation] == ["d0", "d1"]
        # The engines that do prefill may get the weights of these.
        assert await give(weights, await weights.begin_joining(1), 1) == ["p0", "p1"]
        assert not request.done()
        await fleet.abort(["held-0"])
        return await request

    (output,) = fleet.loop.run(lose(), timeout=120)
    assert output["output_ids"] == [5]


def test_nothing_is_sent_any_more_to_an_engine_that_has_left(fleet: Fleet) -> None:
    outside = Fleet(remote(fleet, "p0", "d0", "d1"), fleet.loop)
    outside.start()

    async def leave_one() -> Any:
        request = asyncio.create_task(ask(outside, [HOLD, 5], rid="held"))
        pair = await in_pair(outside)
        await until(lambda: pair.prefilled)
        await outside.leave(pair.member)
        (other,) = outside.answering
        await until(lambda: outside.router.load_of(other) == 1)
        await aborted(outside, request, ["held-0"])
        return pair.member.client._session

    try:
        # Else nobody would close it.
        assert fleet.loop.run(leave_one(), timeout=120) is None
    finally:
        outside.stop(0)


@pytest.fixture
def absent() -> Iterator[RemoteEngine]:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = reserved.getsockname()
    yield RemoteEngine("absent", f"http://127.0.0.1:{address[1]}", api_key=KEY)


def test_an_absent_engine_whose_part_is_unknown_leaves_where_others_answer(fleet: Fleet, absent: RemoteEngine) -> None:
    outside = Fleet([absent, *remote(fleet, "p0", "d0")], fleet.loop)
    try:
        outside.start(absent_leave=True)
        assert [each.name for each in outside.members] == ["p0", "d0"]
        check_abilities(RolloutSettings(hf_checkpoint="m"), outside)
        assert answered(done(ask(outside, [5, 6]))) == [[6, 5, 1]]
    finally:
        outside.stop(0)


def test_a_service_refuses_pairs_that_cannot_do_what_the_run_asks_for(
    fleet: Fleet, absent: RemoteEngine, tmp_path: Path
) -> None:
    model, known, key = str(write_tiny_model(tmp_path / "model")), tmp_path / "engines.json", tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    prefill, decode = remote(fleet, "p0", "d0")
    settings = RolloutSettings(
        hf_checkpoint=model, rm_type="exact_partial", rollout_external_engine_addrs=[prefill.url, decode.url],
        rollout_engine_api_key_file=str(key),
    )  # fmt: skip
    words = "--true-on-policy-mode and engine external-0, which does prefill cannot be used together"
    with pytest.raises(InvalidSetting, match=words):
        open_state(settings, {"true_on_policy_mode": True})
    # A service that is started again while all engines that decode are absent finds them once they are back.
    known.write_text(json.dumps([prefill.url, absent.url]))
    with pytest.raises(InvalidSetting, match="engines that do prefill and engines that decode"):
        open_state(settings, engines_file=str(known))
    assert json.loads(known.read_text()) == [prefill.url, absent.url]
