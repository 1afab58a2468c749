"""Fully asynchronous generation: leases, generates and completes groups until the call is cancelled.

`PacedSource` limits how many groups may start. This module limits only the number in flight: to
--over-sampling-batch-size, or by default to the capacity of the engines. A weight update interrupts requests, which
continue from their tokens (`sample.send`); a group that a user's function cannot continue is leased again.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.calls.outputs import flatten
from slime.rollout.generate.default import RolloutIteration
from slime.rollout.generate.group import Generated
from slime.rollout.generate.state import RolloutState
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.sources.paced import PacedSource
from slime.types import Sample
from slime.types.errors import WrongState

ENGINE_WAIT = "perf/engine_wait_time"
GIVEN_BACK = "rollout/aborted_groups"
SURPLUS = 1.25


class ContinuousCall:
    """Holds the call of Generate that runs without end, while there is one. Thread-safe."""

    def __init__(self) -> None:
        self.source: PacedSource | None = None
        self.call: RolloutCall | None = None
        self._lock = threading.Lock()

    @contextmanager
    def running(self, source: PacedSource) -> Iterator[None]:
        """Registers a call while it runs. Raises WrongState if another one runs: each would use the whole pace."""
        with self._lock:
            if self.source is not None:
                raise WrongState(
                    "a call of Generate with a pace is running", field="pace", expected="one such call at a time"
                )
            self.source = source
        try:
            yield
        finally:
            self.source = self.call = None

    def moved(self, weight_version: int) -> None:
        """Notes that the engines have new weights; from now on hooks get `weight_version` as their rollout_id."""
        source, call = self.source, self.call
        if source is not None:
            source.moved()
        if call is not None:
            call.rollout_id = weight_version


async def generate_on(
    state: RolloutState, args: RolloutArgs, rollout_id: int, data_source: Any, *, over_sampling: int | None
) -> None:
    """Generates until an error or its cancellation.

    over_sampling: maximum number of groups in flight; None: as many as the engines take, at least a batch.
    """
    rollout = _Continuous(state, args, rollout_id, data_source, CALL.get())
    rollout.over_sampling, rollout.over_samples = over_sampling, (over_sampling or 0) > args.rollout_batch_size
    await state.fleet.guard(rollout.go_on())


class _Continuous(RolloutIteration):
    over_sampling: int | None
    over_samples: bool

    async def go_on(self) -> None:
        self._metrics = {} if self.call is None else self.call.metrics
        self._metrics |= {ENGINE_WAIT: 0.0, GIVEN_BACK: 0.0}
        try:
            while True:
                await self._turn()
        finally:
            for task in [*self.pending, *self.writes, *([self.fetching] if self.fetching else [])]:
                task.cancel()

    async def _next_done(self) -> set[asyncio.Task[Any]]:
        started, idle = time.monotonic(), not self.pending
        done = await super()._next_done()
        if idle:
            self._metrics[ENGINE_WAIT] += time.monotonic() - started
        return done

    async def _generate_together(self, groups: list[list[Sample]]) -> None:
        await super()._generate_together(groups)
        # The pace makes room for a new group when the buffer has recorded a rejection. If some were still on their way,
        # timing would decide the size of the next request, and two runs would differ.
        await asyncio.gather(*self.writes)

    def _fetch_size(self) -> int:
        return self._most_in_flight() - len(self.pending)

    def _most_in_flight(self) -> int:
        if self.over_sampling is not None:
            return self.over_sampling
        groups = self.state.fleet.capacity / self.args.n_samples_per_prompt
        if self.state.fleet.options.tunes_concurrency:
            # A tuned limit grows only while requests wait for it.
            groups = max(groups + 1, groups * SURPLUS)
        return max(self.args.rollout_batch_size, math.ceil(groups))

    def _is_short(self) -> bool:
        return not self.over_samples

    async def _decide(self, leased: list[Sample], group: list[Generated]) -> None:
        samples = flatten(group)
        if any(sample.status is Sample.Status.ABORTED for sample in samples):
            await self._give_back(leased, samples)
            self._metrics[GIVEN_BACK] = float(self.given_back)
        elif not self._dropped(leased, group):
            self._complete(leased, samples)
