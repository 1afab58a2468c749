"""The order of a one-step-off run: how far generation is ahead, when weights are pushed, what is trained on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.launcher.config import run_config
from slime.launcher.loops.one_step_off import loop_async
from slime.launcher.loops.prefetch import Prefetch
from slime.launcher.loops.synchronous import loop
from slime.launcher.services.supervisor import Supervisor
from slime.types.errors import EngineError


class Run:
    """Services of which a generation ends when it is told to, or when somebody waits for it."""

    def __init__(self, num_rollout: int = 0, first_step: int = 0, finishes: Callable[[], bool] = lambda: False) -> None:
        self.first_step = first_step
        self.num_rollout = num_rollout
        self.finishes = finishes
        self.events: list[tuple[str, int]] = []
        self.pending: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.version = first_step
        self.made_with: dict[int, int] = {}
        self.sealed: list[int] = []
        self.generated: dict[int, dict[str, float]] = {}
        self.examples: list[Any] = []

    def of(self, kind: str) -> list[int]:
        return [number for name, number in self.events if name == kind]

    def begin(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.pending.append((function, future))
        self.made_with[len(self.made_with) + self.first_step] = self.version
        return future

    def finish(self) -> None:
        function, future = self.pending.pop(0)
        future.set_result(function())

    def join(self, future: Future[Any]) -> Any:
        while not future.done():
            self.finish()
        return future.result()

    def generate(self, rollout_id: int) -> dict[str, float]:
        assert self.sealed == list(range(self.first_step, rollout_id)), "the rollout before has to be sealed"
        self.events.append(("generate", rollout_id))
        return {"rollout/raw_reward": float(rollout_id)}

    def seal(self, step: int, generated: dict[str, float]) -> None:
        self.sealed.append(step)
        self.generated[step] = generated

    def train_step(self, step: int) -> dict[str, float]:
        assert step in self.sealed
        self.events.append(("train", step))
        while self.pending and self.finishes():
            self.finish()
        return self.generated.pop(step) | {"train/loss": 0.0}

    def update_weights(self, version: int) -> dict[str, float]:
        assert not self.pending, "weights are pushed between generations only"
        self.events.append(("push", version))
        self.version = version
        return {}

    def save(self, step: int, path: Path, save_hf: str | None) -> dict[str, float]:
        self.events.append(("save", step))
        return {}

    def evaluate(self, rollout_id: int) -> tuple[dict[str, float], list[Any]]:
        assert not self.pending and self.version == rollout_id, "an evaluation is of the weights that it names"
        self.events.append(("evaluate", rollout_id))
        return {"eval/held": 0.0}, []

    def offload(self) -> dict[str, float]:
        return {}

    onload = offload


class Report:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.metrics: list[dict[str, float]] = []

    def evaluation(self, step: int, metrics: dict[str, float], examples: list[Any]) -> None: ...

    def hold(self, step: int, metrics: dict[str, float]) -> None: ...

    def step(self, step: int, metrics: dict[str, float], examples: list[Any]) -> None:
        assert metrics["rollout/raw_reward"] == step, "the metrics of a rollout belong to the step that trains on it"
        self.steps.append(step)
        self.metrics.append(metrics)


def config(*more: str) -> run_config.RunConfig:
    return run_config.parse(["--hf-checkpoint", "m", "--prompt-data", "p", *more], check=False, environment={})


def run_async(run: Run, *more: str) -> Report:
    report = Report()
    loop_async(config("--num-rollout", str(run.num_rollout), *more), run, report)  # type: ignore[arg-type]
    return report


def test_by_default_each_rollout_is_made_with_the_weights_of_one_step_before() -> None:
    run = Run(4)
    run_async(run)
    assert run.events == [
        ("generate", 0), ("train", 0), ("generate", 1), ("push", 1),
        ("train", 1), ("generate", 2), ("push", 2),
        ("train", 2), ("generate", 3), ("push", 3),
        ("train", 3), ("push", 4),
    ]  # fmt: skip
    assert run.made_with == {0: 0, 1: 0, 2: 1, 3: 2}


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_rollout_is_trained_on_once_and_in_order_whatever_is_faster(data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 3), label="first")
    count = data.draw(st.integers(1, 8), label="rollouts")
    size, interval = data.draw(st.integers(1, 3), label="size"), data.draw(st.integers(1, 4), label="interval")
    run = Run(first + count, first, finishes=lambda: data.draw(st.booleans(), label="a generation ends"))
    report = run_async(run, "--async-buffer-size", str(size), "--update-weights-interval", str(interval))
    steps = list(range(first, first + count))
    assert run.of("generate") == run.of("train") == report.steps == steps
    due = {step + 1 for step in steps if (step + 1) % interval == 0 or step == steps[-1]}
    assert run.of("push") == sorted(due)
    for step in steps:
        # As old as the rollouts that wait, and what was trained on since the last push.
        assert 0 <= step - run.made_with[step] <= size + interval - 1


@given(st.integers(1, 4), st.integers(0, 10), st.lists(st.sampled_from(["take", "pause", "finish"]), max_size=40))
def test_generation_is_never_further_ahead_than_it_may_nor_idle_without_reason(
    size: int, count: int, actions: list[str]
) -> None:
    run, taken, paused = Run(count), 0, False
    with Prefetch(run, range(count), size) as prefetch:
        for action in actions:
            if action == "take" and taken < count:
                prefetch.take(taken)
                taken, paused = taken + 1, False
            elif action == "pause":
                prefetch.pause()
                paused = True
                assert not run.pending
            elif action == "finish" and run.pending:
                run.finish()
            begun = len(run.made_with)
            assert begun - taken <= size and len(run.pending) <= 1
            if taken and not paused and not run.pending:
                assert begun == count or begun - taken == size
    begun = len(run.made_with)
    while run.pending:
        run.finish()
    assert len(run.made_with) == begun, "nothing is begun after the end"


def test_an_evaluation_is_of_the_weights_of_its_step_also_between_pushes() -> None:
    run = Run(5)
    more = ("--update-weights-interval", "3", "--eval-prompt-data", "held", "f", "--eval-interval", "2")
    run_async(run, *more, "--save-interval", "4")
    assert run.of("evaluate") == [0, 2, 4, 5]
    assert run.of("push") == [2, 3, 4, 5]
    assert run.of("save") == [3, 4]


def test_the_synchronous_loop_pushes_at_the_same_interval() -> None:
    run, report = Run(5), Report()
    loop(config("--num-rollout", "5", "--update-weights-interval", "2"), run, report)  # type: ignore[arg-type]
    assert run.of("push") == [2, 4, 5]
    assert report.steps == run.of("train") == [0, 1, 2, 3, 4]


def test_the_time_that_both_worked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter(range(0, 1000, 10))
    monkeypatch.setattr("slime.launcher.loops.prefetch.time.perf_counter", lambda: next(ticks))
    run = Run(2)
    prefetch = Prefetch(run, range(2), 1)
    prefetch.take(0)  # generated from 0 to 10
    assert prefetch.seconds_generating(10, 20) == 0
    run.finish()  # rollout 1, from 20 to 30
    assert prefetch.seconds_generating(15, 28) == 8
    assert prefetch.seconds_generating(28, 90) == 2


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", start_seconds=300, stop_seconds=10)
    yield supervisor
    supervisor.stop()


def test_what_was_begun_and_fails_ends_the_call_that_runs_beside_it(supervisor: Supervisor) -> None:
    never = threading.Event()

    def fail() -> None:
        raise EngineError("engine 3 died")

    future = supervisor.begin(fail)
    with pytest.raises(EngineError, match="engine 3 died"):
        supervisor.call(lambda: never.wait(60))
    with pytest.raises(EngineError, match="engine 3 died"):
        supervisor.join(future)
    never.set()


def test_what_was_begun_is_joined_with_its_value(supervisor: Supervisor) -> None:
    future = supervisor.begin(lambda: supervisor.call(lambda: 2))
    assert supervisor.call_all([lambda: 1]) == [1]
    assert supervisor.join(future) == 2
