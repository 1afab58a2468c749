"""Groups that threads complete at the same time go to the buffer in few calls, and each thread gets its own error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from rollout_fakes import FakeBuffer, prompt_groups

from slime.rollout.sources.joint_calls import MOST_CALLS, JointCalls
from slime.rollout.sources.leased import JOINT_TOKENS, LeasedDataSource
from slime.types import Sample
from slime.types.errors import DeadlineExceeded, InvalidField, LeaseLost, SlimeError, Unavailable, WrongState

SECONDS = 60.0


class Store:
    """Notes the values of each call. The first `MOST_CALLS` calls wait until `opened`; values in `refused` fail."""

    def __init__(self, refused: dict[int, Exception] | None = None) -> None:
        self.calls: list[list[int]] = []
        self.stored: set[int] = set()
        self.refused = refused or {}
        self.opened = threading.Event()
        self.begun = threading.Semaphore(0)
        self._lock = threading.Lock()

    def one(self, value: int) -> None:
        self.several([value])

    def several(self, values: list[int]) -> None:
        with self._lock:
            self.calls.append(values)
            waits = len(self.calls) <= MOST_CALLS
        self.begun.release()
        if waits:
            assert self.opened.wait(SECONDS)
        for value in values:
            if value in self.refused:
                raise self.refused[value]
        self.stored.update(values)


def wait_until_collected(calls: JointCalls[Any], count: int) -> None:
    """Waits until so many values wait for the next call."""
    deadline = time.monotonic() + SECONDS
    with calls._changed:
        # Nothing is notified when a value is collected.
        while not calls._changed.wait_for(lambda: len(calls._collected) == count, 0.01):
            assert time.monotonic() < deadline, f"{len(calls._collected)} of {count} values wait"


def hand_over(store: Store, values: range) -> list[Future[None]]:
    """Hands values over in threads of their own: `MOST_CALLS` calls are under way before the others come."""
    calls = JointCalls(store.one, store.several)
    with ThreadPoolExecutor(len(values)) as pool:
        futures = []
        for value in values[:MOST_CALLS]:
            futures.append(pool.submit(calls, value))
            assert store.begun.acquire(timeout=SECONDS)
        futures += [pool.submit(calls, value) for value in values[MOST_CALLS:]]
        wait_until_collected(calls, len(values) - MOST_CALLS)
        store.opened.set()
    return futures


def test_what_comes_while_calls_are_under_way_is_one_call() -> None:
    store = Store()
    futures = hand_over(store, range(12))
    assert [future.result() for future in futures] == [None] * 12
    assert store.calls[:MOST_CALLS] == [[0], [1]] and [sorted(call) for call in store.calls[MOST_CALLS:]] == [
        list(range(2, 12))
    ]
    assert store.stored == set(range(12))


def test_each_thread_gets_the_error_of_its_own_value() -> None:
    errors = {3: InvalidField("reward", None, "a number"), 5: TypeError("not a sample"), 0: LeaseLost("late")}
    store = Store(errors)
    futures = hand_over(store, range(8))
    assert {value: future.exception() for value, future in enumerate(futures) if future.exception()} == errors
    assert store.stored == {1, 2, 4, 6, 7}


@pytest.mark.parametrize("kind", [Unavailable, DeadlineExceeded])
def test_an_outage_is_the_error_of_all_threads_and_not_waited_for_again(kind: type[SlimeError]) -> None:
    store = Store({5: kind("the buffer does not answer", field="address")})
    futures = hand_over(store, range(8))
    assert [future.exception() for future in futures[:2]] == [None, None] and len(store.calls) == 3
    errors = [future.exception() for future in futures[2:]]
    assert {(type(error), str(error)) for error in errors} == {(kind, "the buffer does not answer")}
    assert len({id(error) for error in errors}) == 6


def finish(group: list[Sample], tokens: int = 2) -> None:
    for sample in group:
        sample.__dict__.update(tokens=[1] * tokens, response="2", response_length=1, reward=1.0)
        sample.status = Sample.Status.COMPLETED


@pytest.mark.parametrize("lost", [False, True])
def test_a_source_completes_groups_of_several_threads_in_one_call(lost: bool) -> None:
    groups = prompt_groups(10, 2)

    class Slow(FakeBuffer):
        def complete_group(self, token: str, samples: list[Sample]) -> bool:
            if samples[0].group_index in (0, 1):
                begun.release()
                assert opened.wait(SECONDS)
            return super().complete_group(token, samples)

    buffer, begun, opened = Slow(groups), threading.Semaphore(0), threading.Event()
    with LeasedDataSource(buffer, worker_id="me") as source, ThreadPoolExecutor(10) as pool:
        leased = source.get_samples(10)
        for group in leased:
            finish(group)
        if lost:
            # Its lease expires: it is leased again, and completed under the new lease.
            token = next(token for token, group in buffer.leased.items() if group.group_index == 4)
            buffer.waiting.append(groups[buffer.leased.pop(token).group_index])
        futures = []
        for group in leased[:2]:
            futures.append(pool.submit(source.complete, group))
            assert begun.acquire(timeout=SECONDS)
        futures += [pool.submit(source.complete, group) for group in leased[2:]]
        wait_until_collected(source._hand_in, 8)
        opened.set()
        assert [future.result(SECONDS) for future in futures] == [None] * 10
    assert set(buffer.completed) == set(range(10)) and buffer.calls_with_several == 1
    assert sorted(group[0].group_index for group in source.completed) == list(range(10)) and not buffer.returned


def test_a_group_that_is_leased_again_while_it_waits_is_completed_under_the_new_lease() -> None:
    class Expiring(FakeBuffer):
        def complete_group(self, token: str, samples: list[Sample]) -> bool:
            if token in self.leased and not again:
                again.append(self.leased.pop(token).group_index)
                self.waiting.append(self.groups[0])
                source.get_samples(1)
            return super().complete_group(token, samples)

    buffer, again = Expiring(prompt_groups(2, 2)), list[int]()
    with LeasedDataSource(buffer, worker_id="me") as source:
        (group,) = source.get_samples(1)
        finish(group)
        source.complete(group)
    assert again == [0] and set(buffer.completed) == {0}


def test_long_groups_are_completed_in_calls_of_their_own() -> None:
    buffer = FakeBuffer(prompt_groups(2, 2))
    with LeasedDataSource(buffer, worker_id="me") as source:
        handed_in: list[str] = []
        hand_in = source._hand_in.__call__
        source._hand_in = lambda group: (handed_in.append(group[0]), hand_in(group))  # type: ignore[assignment]
        for group, tokens in zip(source.get_samples(2), (JOINT_TOKENS // 2, JOINT_TOKENS // 2 + 1), strict=True):
            finish(group, tokens)
            source.complete(group)
    assert set(buffer.completed) == {0, 1} and handed_in == ["token-0"]


def test_no_call_begins_once_the_source_is_closed() -> None:
    buffer = FakeBuffer(prompt_groups(1, 2))
    with LeasedDataSource(buffer, worker_id="me") as source:
        (group,) = source.get_samples(1)
        finish(group)
        hand_in = source._hand_in
    for several in (False, True):
        with pytest.raises(WrongState, match="has ended"):
            hand_in._several([("token-0", group)]) if several else hand_in(("token-0", group))
    assert not buffer.completed and not buffer.calls_with_several
