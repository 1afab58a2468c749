"""Generation beside the training loop, from the first step to the last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from slime.launcher.config.checks.loop import staleness_bound
from slime.launcher.config.run_config import RunConfig
from slime.rollout.metrics import CURRENT
from slime.types.clients.rollout import StopSignal
from slime.types.pace import WAIT, TrainerPace

Metrics = dict[str, float]
GenerateOn: TypeAlias = Callable[[int, TrainerPace, StopSignal, Callable[[Metrics], None]], None]


class BackgroundCalls(Protocol):
    """The methods of `Services` that are used here."""

    def begin(self, function: Callable[[], None]) -> Future[None]: ...
    def join(self, future: Future[None]) -> None: ...


def pace_of(config: RunConfig) -> TrainerPace:
    settings = config.launcher
    return TrainerPace(
        max_staleness=staleness_bound(config.flat),
        groups_per_step=config.rollout.rollout_batch_size,
        stop_step=settings.num_rollout or 0,
        policy=settings.staleness_policy or WAIT,
    )


class ContinuousGeneration:
    """Generates for as long as its context lasts. generate_on: the method of a rollout client."""

    def __init__(self, run: BackgroundCalls, generate_on: GenerateOn, pace: TrainerPace, first_step: int) -> None:
        self._run = run
        self._generate_on = generate_on
        self._pace = pace
        self._first_step = first_step
        self._stop = StopSignal()
        self._future: Future[None] | None = None
        self._lock = threading.Lock()
        self._sums: Metrics = {}
        self._taken: Metrics = {}

    def __enter__(self) -> Self:
        self._future = self._run.begin(lambda: self._generate_on(self._first_step, self._pace, self._stop, self._note))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if kind is None and self._future is not None:
            self._run.join(self._future)

    def _note(self, sums: Metrics) -> None:
        with self._lock:
            self._sums = sums

    def take_metrics(self) -> Metrics:
        """Returns the increase of each sum since the last call, and the other metrics as they are."""
        with self._lock:
            sums = dict(self._sums)
        new = {name: value - self._taken.get(name, 0.0) for name, value in sums.items() if name not in CURRENT}
        self._taken = sums
        return sums | new
