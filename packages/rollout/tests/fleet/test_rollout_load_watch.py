"""The limit of samples in flight follows the load that an engine reports over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rollout_fakes import FakeBuffer, FakeEngine, prompt_groups

from slime.rollout.fleet import load_watch
from slime.rollout.fleet.concurrency import POLLS, START
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.generate.state import RolloutState
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.sources import LeasedDataSource

PROMPT = [4, 5, 6]
PARAMS = {"max_new_tokens": 4}


def figures(running: int = 1, waiting: int = 0, usage: float = 0.1, capacity: int = 10**6) -> dict[str, Any]:
    load = {"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage}
    return {"loads": [load | {"dp_rank": 0, "max_total_num_tokens": capacity}]}


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def tuned(make_state, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RolloutState]:
    monkeypatch.setattr(load_watch, "POLL_SECONDS", 0.01)

    def make(*engines: FakeEngine, **settings: Any) -> RolloutState:
        return make_state(*engines, rollout_tune_concurrency=True, **{"sglang_server_concurrency": 64} | settings)

    return make


class Requests:
    """So many requests, sent at once; `answered` counts them."""

    def __init__(self, fleet: Fleet, count: int) -> None:
        self.answered = 0
        self.fleet = fleet
        self.sent = [asyncio.run_coroutine_threadsafe(self._one(), fleet.loop.loop) for _ in range(count)]

    async def _one(self) -> None:
        await self.fleet.generate([PROMPT], [PARAMS], rids=[f"request-{id(asyncio.current_task())}"])
        self.answered += 1


@pytest.fixture
def held(engine: FakeEngine) -> Iterator[FakeEngine]:
    """An engine that answers only after an abort."""
    engine.held_prompts = {tuple(PROMPT)}
    yield engine
    assert engine._abort is not None
    engine._loop.call_soon_threadsafe(engine._abort.set)


def test_more_requests_are_sent_while_none_waits_at_the_engine(tuned, held) -> None:
    held.loads = figures()
    fleet = tuned(held).fleet
    assert fleet.capacity == START
    Requests(fleet, 40)
    wait_until(lambda: len(held.requests) == 40)
    assert max(held.polled[:POLLS]) <= START and fleet.capacity == 64
    assert fleet.concurrency_metrics == {
        "rollout/concurrency": 64.0, "rollout/concurrency/min": 64.0, "rollout/concurrency/max": 64.0,
    }  # fmt: skip


def test_an_engine_that_reports_no_load_has_the_fixed_limit_and_that_is_logged_once(tuned, held, caplog) -> None:
    fleet = tuned(held).fleet
    Requests(fleet, 40)
    wait_until(lambda: len(held.requests) == 40)
    assert fleet.capacity == 64 and fleet.concurrency_metrics == {} and len(held.polled) == 1
    assert [record.args[:2] for record in caplog.records if "does not report its load" in record.msg] == [
        ("fake-0", 64)
    ]


def test_retractions_in_answers_cut_the_limit(tuned, engine) -> None:
    engine.loads, engine.meta_info = figures(usage=0.97), {"num_retractions": 2}
    fleet = tuned(engine).fleet
    (member,) = fleet.members
    while member.limit.cuts < 3:
        requests = Requests(fleet, START)
        wait_until(lambda requests=requests: requests.answered == START)
    assert fleet.capacity < START


def test_a_poll_that_is_not_answered_ends_at_its_deadline_and_another_follows(tuned, held, monkeypatch) -> None:
    monkeypatch.setattr(load_watch, "TIMEOUT_SECONDS", 0.05)
    held.loads = TimeoutError()
    fleet = tuned(held).fleet
    Requests(fleet, 1)
    wait_until(lambda: len(held.polled) >= 3)
    assert fleet.capacity == START


def test_an_idle_or_paused_engine_is_not_polled_and_a_pause_begins_afresh(tuned, held) -> None:
    held.loads = figures()
    fleet = tuned(held).fleet
    (member,) = fleet.members
    assert not load_watch._generates(member, fleet.router)
    Requests(fleet, 1)
    wait_until(lambda: len(held.polled) >= 1)
    assert load_watch._generates(member, fleet.router)
    cuts = member.limit.cuts
    fleet.loop.run(member.hold())
    assert member.limit.cuts == cuts + 1 and not load_watch._generates(member, fleet.router)
    fleet.loop.run(member.serve())
    assert load_watch._generates(member, fleet.router)
    fleet.loop.run(fleet.router.shut("new weights"))
    assert not load_watch._generates(member, fleet.router)


def test_a_rollout_generates_all_its_groups_under_a_tuned_limit(tuned, engine) -> None:
    engine.loads = figures()
    state = tuned(engine, rollout_batch_size=30, n_samples_per_prompt=2)
    buffer = FakeBuffer(prompt_groups(30, 2))
    with LeasedDataSource(buffer, worker_id="test") as source:
        generate_rollout(state.args, 0, source)
    assert len(buffer.completed) == 30
