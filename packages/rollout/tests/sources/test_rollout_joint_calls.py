"""Groups that threads complete at the same time go to the buffer in few calls, and each thread gets its own error."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from rollout_fakes import FakeBuffer, prompt_groups

from slime.rollout.sources.joint_calls import MOST_CALLS, JointCalls
from slime.rollout.sources.leased import LeasedDataSource
from slime.types import Sample
from slime.types.errors import InvalidField, LeaseLost, Unavailable

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


def collected(calls: JointCalls[Any], count: int) -> bool:
    """Returns whether so many values wait for the next call, after a while at the latest."""
    with calls._changed:
        return calls._changed.wait_for(lambda: len(calls._collected) == count, 0.01)


def hand_over(store: Store, values: range) -> list[Future[None]]:
    """Hands values over in threads of their own: `MOST_CALLS` calls are under way before the others come."""
    calls = JointCalls(store.one, store.several)
    with ThreadPoolExecutor(len(values)) as pool:
        futures = []
        for value in values[:MOST_CALLS]:
            futures.append(pool.submit(calls, value))
            assert store.begun.acquire(timeout=SECONDS)
        futures += [pool.submit(calls, value) for value in values[MOST_CALLS:]]
        while not collected(calls, len(values) - MOST_CALLS):
            continue
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
    errors = {3: InvalidField("reward", None, "a number"), 5: Unavailable("the buffer is gone"), 0: LeaseLost("late")}
    store = Store(errors)
    futures = hand_over(store, range(8))
    assert {value: future.exception() for value, future in enumerate(futures) if future.exception()} == errors
    assert store.stored == {1, 2, 4, 6, 7}


def test_an_error_of_the_program_reaches_one_thread_and_the_others_store_their_values() -> None:
    class Broken(Store):
        def several(self, values: list[int]) -> None:
            super().several(values)
            if len(values) > 1:
                raise ZeroDivisionError

    store = Broken()
    futures = hand_over(store, range(6))
    assert [type(future.exception()) for future in futures].count(ZeroDivisionError) == 1
    assert sorted(value for call in store.calls if len(call) == 1 for value in call)[:2] == [0, 1]
    assert sum(future.exception() is None for future in futures) == 5 and len(store.calls) == 3 + 3


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
            for sample in group:
                sample.__dict__.update(tokens=[1, 2], response="2", response_length=1, reward=1.0)
                sample.status = Sample.Status.COMPLETED
        if lost:
            # Its lease expires: it is leased again, and completed under the new lease.
            token = next(token for token, group in buffer.leased.items() if group.group_index == 4)
            buffer.waiting.append(groups[buffer.leased.pop(token).group_index])
        futures = []
        for group in leased[:2]:
            futures.append(pool.submit(source.complete, group))
            assert begun.acquire(timeout=SECONDS)
        futures += [pool.submit(source.complete, group) for group in leased[2:]]
        while not collected(source._hand_in, 8):
            continue
        opened.set()
        assert [future.result(SECONDS) for future in futures] == [None] * 10
    assert set(buffer.completed) == set(range(10)) and buffer.calls_with_several == 1
    assert sorted(group[0].group_index for group in source.completed) == list(range(10)) and not buffer.returned
