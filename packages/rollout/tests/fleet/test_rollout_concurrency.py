"""The law by which the limit of samples in flight follows an engine's load."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_simulated_engine import SimulatedEngine

from slime.rollout.fleet.concurrency import POLLS, START, ConcurrencyLimit, EngineLoad
from slime.types.errors import InvalidField

MOST = 512


def window(limit: ConcurrencyLimit, load: EngineLoad, *, turned: bool = True, held_back: bool = True) -> int:
    """Feeds a window of polls with as many samples in flight as allowed. turned: whether all of them are answered."""
    in_flight = limit.value
    for poll in range(POLLS):
        if turned and poll == POLLS - 1:
            limit.answered(in_flight, 0, limit.cuts)
        limit.observe(load, in_flight, held_back)
    return limit.value


def load(running: int = 1, waiting: int = 0, usage: float = 0.1, capacity: int = 0) -> EngineLoad:
    return EngineLoad(running, waiting, usage, capacity)


def test_it_grows_while_nothing_queues_and_requests_are_held_back() -> None:
    limit = ConcurrencyLimit(MOST)
    assert [window(limit, load()) for _ in range(4)] == [32, 64, 128, 256]
    assert [window(limit, load(usage=0.776)) for _ in range(2)] == [320, 400]
    assert window(limit, load(), held_back=False) == 400


def test_it_waits_for_answers_where_the_longest_responses_would_not_fit() -> None:
    limit = ConcurrencyLimit(MOST)
    limit.began(1000)
    assert window(limit, load(capacity=100_000), turned=False) == 32
    assert window(limit, load(capacity=100_000), turned=False) == 32 + 32
    assert window(limit, load(capacity=100_000), turned=False) == 64
    assert window(limit, load(capacity=100_000)) == 128


def test_what_queues_all_the_time_is_trimmed_and_growth_is_slow_from_there() -> None:
    limit = ConcurrencyLimit(MOST, start=100)
    assert window(limit, load(running=70, waiting=30), turned=False) == 100
    assert window(limit, load(running=70, waiting=30)) == 70
    assert window(limit, load(running=70)) == 71
    assert window(limit, load(running=71)) == 72


def test_a_trim_that_makes_the_engine_run_fewer_is_undone() -> None:
    limit = ConcurrencyLimit(MOST, start=100)
    assert window(limit, load(running=80, waiting=20)) == 80
    assert window(limit, load(running=64, waiting=16)) == 100
    # Waiting requests that are only on their way are no reason to trim again.
    assert window(limit, load(running=80, waiting=20)) >= 100


def test_retractions_cut_in_proportion_and_at_once_where_they_are_many() -> None:
    limit = ConcurrencyLimit(MOST, start=100)
    for _ in range(POLLS):
        limit.answered(25, 3, limit.cuts)
        limit.observe(load(), 100, True)
    assert limit.value == 94
    for _ in range(POLLS):
        assert limit.observe(load(usage=1.0), 100, True) == 94, "a cut drains before the next one"
    limit.observe(load(), 94, True)
    limit.observe(load(), 94, True)
    began = limit.cuts
    limit.answered(10, 47, began)
    assert limit.observe(load(), 94, True) == 70
    limit.observe(load(), 70, True)
    limit.answered(70, 70, began)
    for _ in range(POLLS):
        limit.observe(load(usage=0.97), 70, True)
    assert limit.value == 70, "retractions of requests from before the cut say nothing about the limit after it"


def test_a_few_retractions_pass() -> None:
    limit = ConcurrencyLimit(MOST, start=100)
    limit.answered(20, 9, limit.cuts)
    assert window(limit, load(usage=0.97)) == 100


def test_a_full_cache_cuts_and_a_pause_does_not() -> None:
    limit = ConcurrencyLimit(MOST, start=100)
    assert window(limit, load(usage=1.0)) == 97
    limit = ConcurrencyLimit(MOST, start=100)
    began = limit.began(100)
    limit.interrupted()
    limit.answered(50, 50, began)
    assert window(limit, load(usage=0.97), turned=False) == 100


loads = st.builds(
    EngineLoad, running=st.integers(0, 600), waiting=st.integers(0, 600), usage=st.floats(0, 1.2),
    capacity=st.sampled_from([0, 1000, 10**6]),
)  # fmt: skip
events = st.lists(
    st.one_of(
        st.tuples(st.just("poll"), loads, st.integers(0, 600), st.booleans()),
        st.tuples(st.just("answer"), st.integers(0, 600), st.integers(0, 50)),
        st.tuples(st.just("pause")),
    ),
    max_size=80,
)


def play(limit: ConcurrencyLimit, history: list[tuple[object, ...]]) -> None:
    for event in history:
        if event[0] == "poll":
            limit.observe(*event[1:])  # type: ignore[arg-type]
        elif event[0] == "answer":
            limit.answered(int(event[1]), int(event[2]), limit.began(100))  # type: ignore[call-overload]
        else:
            limit.interrupted()
        assert 1 <= limit.value <= limit.most


@settings(deadline=None)
@given(st.integers(1, 600), events)
def test_the_limit_stays_within_its_bounds(most: int, history: list[tuple[object, ...]]) -> None:
    limit = ConcurrencyLimit(most)
    assert limit.value == min(START, most)
    play(limit, history)


@settings(deadline=None)
@given(events)
def test_whatever_happened_an_engine_with_room_is_filled_again(history: list[tuple[object, ...]]) -> None:
    limit = ConcurrencyLimit(MOST)
    play(limit, history)
    # All that may have been in flight when the last window began.
    limit.answered(600, 0, limit.cuts)
    for _ in range(60):
        window(limit, load(usage=0.2))
    assert limit.value == MOST


@settings(deadline=None)
@given(events)
def test_whatever_happened_it_goes_down_to_one_sample_but_not_below(history: list[tuple[object, ...]]) -> None:
    limit = ConcurrencyLimit(MOST)
    play(limit, history)
    for _ in range(300):
        window(limit, load(usage=1.0))
    assert limit.value == 1


def log_normal(mean: float, sigma: float = 1.0, most: int = 1000) -> Callable[[random.Random], int]:
    return lambda rng: max(1, min(most, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


CURVES = {
    "a batch of at most 96": SimulatedEngine(
        lambda n: 0.01 + 1e-4 * n, lambda rng: rng.randint(48, 80), max_running=96
    ),
    "a batch that saturates": SimulatedEngine(lambda n: 0.002 + 1e-3 * n, lambda rng: rng.randint(48, 80)),
    "no gain from a batch": SimulatedEngine(lambda n: 0.002 * n, lambda rng: rng.randint(20, 40)),
    "a small cache": SimulatedEngine(lambda n: 0.01 + 2e-5 * n, log_normal(200), cache_tokens=20_000),
    "a cache that alone limits": SimulatedEngine(lambda n: 0.01, log_normal(200), cache_tokens=20_000),
}


def fresh(engine: SimulatedEngine, **changed: object) -> SimulatedEngine:
    made = replace(engine, waiting=type(engine.waiting)(), running=[], **changed)  # type: ignore[arg-type]
    return made


def best_of(engine: SimulatedEngine, seconds: float) -> float:
    rates = []
    for value in (8, 32, 64, 96, 128, 512):
        one = fresh(engine)
        one.serve(value, 15)
        rates.append(one.serve(value, seconds))
    return max(rates)


@pytest.mark.parametrize("name", CURVES)
def test_it_finds_the_best_value_of_an_engine(name: str) -> None:
    engine, limit = fresh(CURVES[name]), ConcurrencyLimit(MOST)
    engine.serve(limit, 15)
    assert engine.serve(limit, 60) >= 0.95 * best_of(CURVES[name], 60)


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 300), st.floats(0.004, 0.03), st.floats(0, 5e-4), st.integers(0, 3))
def test_it_fills_every_batch(max_running: int, step: float, per_sample: float, seed: int) -> None:
    def made() -> SimulatedEngine:
        return SimulatedEngine(
            lambda n: step + per_sample * n, lambda rng: rng.randint(20, 60), max_running=max_running, seed=seed
        )

    tuned, limit, fixed = made(), ConcurrencyLimit(MOST), made()
    tuned.serve(limit, 40)
    fixed.serve(MOST, 10)
    assert tuned.serve(limit, 20) >= 0.95 * fixed.serve(MOST, 20)
    assert limit.value <= max_running * 1.1 + 6, "nothing is left to queue"


def test_it_follows_an_engine_that_changes() -> None:
    engine, limit = SimulatedEngine(lambda n: 0.01 + 1e-4 * n, lambda rng: rng.randint(48, 80)), ConcurrencyLimit(MOST)
    for max_running in (128, 16, 200):
        engine.max_running = max_running
        engine.serve(limit, 60)
        assert 0.95 * max_running <= limit.value <= 1.1 * max_running + 2


def test_it_retracts_far_less_than_a_limit_that_is_too_high() -> None:
    tuned, limit = fresh(CURVES["a small cache"]), ConcurrencyLimit(MOST)
    tuned.serve(limit, 60)
    fixed = fresh(CURVES["a small cache"])
    fixed.serve(MOST, 60)
    assert 0 < tuned.retracted < fixed.retracted / 2


@pytest.mark.parametrize(
    "answer", [{}, [], {"loads": []}, {"loads": [{"num_running_reqs": 1}]}, {"loads": [None]}, {"message": "x"}]
)
def test_figures_that_are_not_sglangs_are_refused(answer: object) -> None:
    with pytest.raises(InvalidField, match="load figures"):
        EngineLoad.from_answer(answer)


def test_the_figures_of_all_ranks_are_added() -> None:
    rank = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25, "max_total_num_tokens": 100}
    answer = {"loads": [rank, rank | {"num_running_reqs": 5, "token_usage": 0.5}]}
    assert EngineLoad.from_answer(answer) == EngineLoad(8, 2, 0.5, 200)
