"""Paced leases and steps: no sample is trained on later than its staleness allows, and nothing waits for ever."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from buffer_samples import finish
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.buffer.groups.pacing import Deadlines, Unsealed, choose
from slime.buffer.service import RunningBuffer
from slime.buffer.store.base import State
from slime.types.clients import BufferClient
from slime.types.errors import DeadlineExceeded, InvalidField, LeaseLost
from slime.types.pace import DROP, KEEP, WAIT, TrainerPace
from slime.types.sample.parts import TokenSpan


def pace(staleness: int, size: int = 2, *, policy: str = WAIT, version: int = 0, stop: int = 100) -> TrainerPace:
    return TrainerPace(
        max_staleness=staleness, groups_per_step=size, stop_step=stop, policy=policy, weight_version=version
    )


@pytest.fixture
def client(connected: Callable[..., BufferClient]) -> BufferClient:
    client = connected()
    client.add_prompts([str(number) for number in range(100)])
    return client


def complete(client: BufferClient, lease, version: int) -> None:
    (sample,) = finish(lease.group.samples)
    sample.weight_versions, sample.spans = [str(version)], [TokenSpan(0, 3, "", str(version))]
    client.complete_group(lease.token, [sample])


def indexes(leases) -> list[int]:
    return [lease.group.group_index for lease in leases]


def sealed(client: BufferClient, step: int, pace: TrainerPace) -> list[int]:
    return sorted({summary.group_index for summary in client.seal_step(step, pace.groups_per_step, pace=pace)})


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_more_is_leased_than_can_be_trained_on_in_time(client: BufferClient, staleness: int) -> None:
    leases = client.lease_groups(50, pace=pace(staleness))
    assert len(leases) == 2 * (staleness + 1)
    assert client.lease_groups(1, pace=pace(staleness)) == []
    client.reject_group(leases[0].token, "filtered")
    replaced = client.lease_groups(9, pace=pace(staleness))
    assert len(replaced) == 1
    for lease in [*leases[1:], *replaced][:2]:
        complete(client, lease, 0)
    client.seal_step(0, 2, pace=pace(staleness))
    assert client.lease_groups(1, pace=pace(staleness)) == [], "the engines still have the weights of version 0"
    assert len(client.lease_groups(9, pace=pace(staleness, version=1))) == 2


def test_the_last_step_ends_the_leases(client: BufferClient) -> None:
    assert len(client.lease_groups(9, pace=pace(4, stop=3))) == 6


def test_a_step_takes_what_is_complete_unless_what_is_due_would_be_late(client: BufferClient) -> None:
    leases = client.lease_groups(9, pace=pace(1))
    for lease in (leases[1], leases[3]):
        complete(client, lease, 0)
    assert sealed(client, 0, pace(1)) == [1, 3]
    newer = client.lease_groups(9, pace=pace(1, version=1))
    for lease in newer:
        complete(client, lease, 1)
    # Groups 0 and 2 would be two versions old in the step after this one.
    with pytest.raises(DeadlineExceeded, match="2 of 2 groups were complete"):
        client.seal_step(1, 2, pace=pace(1))
    complete(client, leases[0], 0)
    with pytest.raises(DeadlineExceeded):
        client.seal_step(1, 2, pace=pace(1))
    # A step does not wait for a group that was dropped.
    client.reject_group(leases[2].token, "filtered")
    assert sealed(client, 1, pace(1)) == [0, newer[0].group.group_index]


# Ways in which a group stops being one that a step waits for.
GIVEN_BACK: dict[str, Callable[[BufferClient, Any], object]] = {
    "returned": lambda client, lease: client.return_group(lease.token),
    "worker gone": lambda client, lease: client.requeue_groups("worker"),
    "dropped": lambda client, lease: client.drop_groups([lease.group.group_index]),
    "lease expired": lambda client, lease: None,
}


@pytest.mark.parametrize("way", GIVEN_BACK)
def test_a_step_that_waits_for_a_group_goes_on_as_soon_as_it_is_given_back(
    serving: Callable[..., RunningBuffer], clock: Any, way: str
) -> None:
    running = serving()
    waits = running.buffer.waits
    with BufferClient(running.address) as client, ThreadPoolExecutor(1) as pool:
        client.open_run("run")
        client.add_prompts([str(number) for number in range(5)])
        leases = client.lease_groups(4, ttl_seconds=0.1, worker_id="worker", pace=pace(1))
        for lease in leases[:2]:
            complete(client, lease, 0)
        assert sealed(client, 0, pace(1)) == [0, 1]
        due, other = leases[2:]
        complete(client, other, 0)
        newer = pace(1, version=1)
        complete(client, client.lease_groups(1, pace=newer)[0], 1)
        waiting = pool.submit(client.seal_step, 1, 2, 60.0, pace=newer)
        while not waits._count and not waiting.done():
            threading.Event().wait(0.01)
        assert not waiting.done()
        if way == "lease expired":
            # No call of a worker, which would end the lease, comes meanwhile.
            clock.now += 1.0
        GIVEN_BACK[way](client, due)
        assert len(waiting.result(10.0)) == 2


def test_what_is_too_old_is_dropped_with_its_count_or_kept(client: BufferClient) -> None:
    leases = client.lease_groups(9, pace=pace(1, policy=DROP))
    for lease in leases[:2]:
        complete(client, lease, 0)
    client.seal_step(0, 2, pace=pace(1, policy=DROP))
    complete(client, leases[2], 0)
    for step in (1, 2):
        for lease in client.lease_groups(2, pace=pace(1, policy=DROP, version=step)):
            complete(client, lease, step)
        if step == 1:
            # The complete group of version 0 and one of version 1; then group 3 is late.
            assert sealed(client, 1, pace(1, policy=DROP)) == [2, 4]
    step = client.seal_step(2, 2, pace=pace(1, policy=DROP))
    assert step.rejected == {"stale": 1} and {summary.group_index for summary in step} == {5, 6}
    with pytest.raises(LeaseLost, match="the lease ended by stale"):
        complete(client, leases[3], 0)


def test_a_late_group_is_kept_with_its_number(client: BufferClient) -> None:
    keep = pace(0, policy=KEEP)
    late, *rest = client.lease_groups(2, pace=keep)
    complete(client, rest[0], 0)
    for lease in client.lease_groups(1, pace=pace(1, policy=KEEP)):
        complete(client, lease, 0)
    assert sealed(client, 0, keep) == [1, 2]
    complete(client, late, 0)
    for lease in client.lease_groups(2, pace=pace(0, policy=KEEP, version=1)):
        complete(client, lease, 1)
    step = client.seal_step(1, 2, pace=keep)
    assert [(summary.group_index, summary.oldest_weight_version) for summary in step] == [(0, 0), (3, 1)]


@pytest.mark.parametrize("spans", [True, False])
def test_tokens_that_are_too_old_when_a_group_is_leased_again_are_made_anew(client: BufferClient, spans: bool) -> None:
    first, *others = client.lease_groups(4, pace=pace(1))

    def give_back(lease) -> None:
        (sample,) = finish(lease.group.samples)
        # A user's function may set weight_versions and no spans.
        sample.spans, sample.weight_versions = [TokenSpan(0, 3, "", "0")] if spans else [], ["0"]
        client.return_group(lease.token, [sample])

    give_back(first)
    for lease in others[:2]:
        complete(client, lease, 0)
    client.seal_step(0, 2, pace=pace(1))
    again, fresh = client.lease_groups(2, pace=pace(1, version=1))
    assert indexes([again]) == [0] and again.group.samples[0].response_length == 3
    give_back(again)
    complete(client, others[2], 0)
    complete(client, fresh, 1)
    client.seal_step(1, 2, pace=pace(1))
    afresh = client.lease_groups(1, pace=pace(1, version=2))
    assert indexes(afresh) == [0] and afresh[0].group.samples[0].response_length == 0


@pytest.mark.parametrize(
    ("field", "value"), [("max_staleness", -1), ("groups_per_step", 0), ("stop_step", -1), ("weight_version", -1)]
)
def test_a_pace_out_of_range_is_refused_by_name(client: BufferClient, field: str, value: int) -> None:
    values = {"max_staleness": 1, "groups_per_step": 1, "stop_step": 1, "weight_version": 0} | {field: value}
    with pytest.raises(InvalidField, match=f"pace.{field}"):
        client.lease_groups(1, pace=TrainerPace(**values))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 8), st.integers(0, 2**32))
def test_in_any_order_of_completions_every_group_is_trained_on_in_time_and_the_run_ends(
    size: int, staleness: int, steps: int, seed: int
) -> None:
    random = Random(seed)
    interval = random.randint(1, staleness + 1)
    groups: dict[int, Unsealed] = {}
    next_index = version = step = 0
    while step < steps:
        at = pace(staleness, size, version=version, stop=steps)
        admission = Deadlines(at, [group.weight_version for group in groups.values()], step)
        for _ in range(admission.room(random.randint(0, 20))):
            assert admission.admit(version)
            groups[next_index] = Unsealed(next_index, State.LEASED, version)
            next_index += 1
        running = [group for group in groups.values() if group.state is State.LEASED]
        if running:
            done = random.choice(running)
            groups[done.group_index] = done._replace(state=State.COMPLETED)
        chosen = choose(list(groups.values()), step, size, at)
        if chosen is None:
            assert running or admission.room(1), "a step waits for nothing"
            continue
        taken, stale = chosen
        assert not stale and len(taken) == size
        for index in taken:
            assert step - groups.pop(index).weight_version <= staleness
        step += 1
        if step % interval == 0:
            version = step
    assert not groups


def seconds_of_run(lengths: list[int], size: int, steps: int, staleness: int, train: float) -> float:
    """Returns the length of a fully asynchronous run in virtual time: a group takes as long as its response, a step
    `train`, and the engines take any number of groups at once."""
    groups: dict[int, Unsealed] = {}
    ends: list[tuple[float, int]] = []
    waiting = iter(enumerate(lengths))

    def lease(now: float, version: int, step: int) -> None:
        at = pace(staleness, size, version=version, stop=steps)
        room = Deadlines(at, [group.weight_version for group in groups.values()], step).room(len(lengths))
        for index, length in itertools.islice(waiting, room):
            groups[index] = Unsealed(index, State.LEASED, version)
            heapq.heappush(ends, (now + length, index))

    def complete_next() -> float:
        now, index = heapq.heappop(ends)
        groups[index] = groups[index]._replace(state=State.COMPLETED)
        return now

    now = 0.0
    for step in range(steps):
        lease(now, step, step)
        while (chosen := choose(list(groups.values()), step, size, pace(staleness, size))) is None:
            now = complete_next()
        for index in chosen[0]:
            del groups[index]
        trained = now + train
        while ends and ends[0][0] <= trained:
            complete_next()
        now = trained
    return now


@pytest.mark.parametrize(("staleness", "least", "most"), [(0, 1, 1), (1, 1.6, 2), (2, 1.9, 2), (4, 1.95, 2)])
def test_log_normal_lengths_are_trained_on_faster_the_more_staleness_is_allowed(
    staleness: int, least: float, most: float
) -> None:
    """Engine and trainer take equal time for a synchronous step, so that overlap alone gives at most 2."""
    size, steps = 16, 200
    random = Random(0)
    lengths = [max(1, int(random.lognormvariate(5, 1))) for _ in range(size * steps)]
    rollouts = [max(lengths[i : i + size]) for i in range(0, len(lengths), size)]
    train = sum(rollouts) / len(rollouts)
    ratio = (sum(rollouts) + steps * train) / seconds_of_run(lengths, size, steps, staleness, train)
    assert least - 1e-9 <= ratio <= most + 1e-9
