"""The default rollout: generates groups of the data source until enough are accepted, and gives the rest back.

1. fetch `over_sampling_batch_size` groups whenever accepted + pending are fewer than the target; prompts that are too
   long, empty or cannot be rendered are rejected
2. generate and score each group; complete it as soon as it is accepted, reject it when the dynamic filter drops it
3. when the target is reached, abort the groups that are still running and give them back: with their partial responses
   under `--partial-rollout`, otherwise as they were leased

With `--deterministic`, each fetch is one request, and its groups are accepted or dropped in the order of their index.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.calls.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten
from slime.rollout.generate.evaluation import evaluate
from slime.rollout.generate.filters import DynamicFilterOutput
from slime.rollout.generate.group import (
    Generated,
    finish_group,
    generate_batch,
    generate_group,
    needs_single_calls,
)
from slime.rollout.generate.sample import TOO_LONG, UNUSABLE, refusal
from slime.rollout.generate.state import RolloutState, state_of
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.types import Sample

log = logging.getLogger(__name__)

ABORT_SECONDS = 60.0
ABORT_AGAIN_SECONDS = 2.0
# So many unusable prompts in a row mean that a setting is wrong, not the prompts.
REFUSED_IN_A_ROW = 1000
# So many groups in a row that the dynamic filter drops are worth a warning.
DROPPED_IN_A_ROW = 256


def generate_rollout(
    args: RolloutArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generates `args.rollout_batch_size` scored groups from `data_source`, or the results of an evaluation's sets.

    The contract is that of `--rollout-function-path`. Blocks until all groups are generated.
    """
    state = state_of(args)
    if evaluation:
        return state.loop.run(evaluate(state, data_source))
    return state.loop.run(run_iteration(state, args, rollout_id, data_source))


async def generate_rollout_async(args: RolloutArgs, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """Returns `args.rollout_batch_size` accepted groups, in the order of their first sample's index."""
    return await run_iteration(state_of(args), args, rollout_id, data_source)


async def run_iteration(
    state: RolloutState, args: RolloutArgs, rollout_id: int, data_source: Any
) -> RolloutFnTrainOutput:
    """Does the work of `generate_rollout_async`.

    args: those of the caller, `state.args` or a copy of it, which may have another `rollout_batch_size`.
    """
    return await state.fleet.guard(RolloutIteration(state, args, rollout_id, data_source, CALL.get()).run())


class RolloutIteration:
    """Generates the groups of one iteration; `continuous.py` has a subclass that generates without end."""

    def __init__(
        self, state: RolloutState, args: RolloutArgs, rollout_id: int, source: Any, call: RolloutCall | None
    ) -> None:
        self.state, self.args, self.rollout_id, self.source = state, args, rollout_id, source
        self.target: int = args.rollout_batch_size
        self.call = call
        self.accepted: list[list[Generated]] = []
        self.seen: list[list[Generated]] = []
        self.pending: dict[asyncio.Task[list[Generated]], list[Sample]] = {}
        # Groups of a common request (--deterministic) that are neither accepted nor dropped yet.
        self.undecided = 0
        self.fetching: asyncio.Task[list[list[Sample]]] | None = None
        # Finished tasks in the order in which they ended: groups, the fetch, and failed calls to the buffer. Calling
        # asyncio.wait on all of them after each one would take time quadratic in their number.
        self.done: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.refused_in_a_row = self.dropped_in_a_row = 0
        self.given_back = 0
        # Calls to the buffer that run in the background until the end.
        self.writes: list[asyncio.Task[None]] = []

    async def run(self) -> RolloutFnTrainOutput:
        try:
            while len(self.accepted) < self.target:
                await self._turn()
            await self._give_back_the_rest()
            await _all(self.writes)
        except BaseException:
            for task in [*self.pending, *self.writes, *([self.fetching] if self.fetching else [])]:
                task.cancel()
            raise
        # In a thread: a function of the user may ask the data source for more, or run something on this loop.
        return await _in_thread(self._output)

    async def _turn(self) -> None:
        """Leases missing groups, waits until a task ends, and processes its result."""
        self._check_writes()
        wanted = self._fetch_size()
        if wanted > 0 and self.fetching is None:
            self.fetching = asyncio.create_task(_in_thread(self.source.get_samples, wanted))
            self.fetching.add_done_callback(self.done.put_nowait)
        done = await self._next_done()
        await self._collect(task for task in done if task in self.pending)
        if self.fetching in done:
            groups, self.fetching = self.fetching.result(), None
            await self._start(groups)

    async def _next_done(self) -> set[asyncio.Task[Any]]:
        done = {await self.done.get()}
        while not self.done.empty():
            done.add(self.done.get_nowait())
        return done

    def _fetch_size(self) -> int:
        if len(self.accepted) + len(self.pending) >= self.target:
            return 0
        wanted = max(self.args.over_sampling_batch_size or 0, self.target)
        if wanted > self.target or not (self.accepted or self.pending):
            return wanted
        # Without over-sampling, lease only the missing groups: any more would be generated for nothing.
        return self.target - len(self.accepted) - len(self.pending)

    async def _start(self, groups: list[list[Sample]]) -> None:
        groups = [group for group in groups if await self._fits(group)]
        groups.sort(key=lambda group: group[0].group_index or 0)
        for group in groups:
            for sample in group:
                if sample.status is Sample.Status.ABORTED:
                    sample.status = Sample.Status.PENDING
        if self.args.deterministic and groups and not needs_single_calls(self.state, flatten(groups)):
            await self._generate_together(groups)
            return
        for group in groups:
            task = asyncio.create_task(generate_group(self.state, self.args, group, self.state.sampling_params))
            task.add_done_callback(self.done.put_nowait)
            self.pending[task] = group

    async def _fits(self, group: list[Sample]) -> bool:
        """Returns whether the prompt of a group can be used; rejects the group, with the reason, if it cannot."""
        limit, context = self.args.rollout_max_prompt_len, self.state.context_len
        # Not in a thread: more groups would be leased meanwhile.
        refused = await refusal(self.state, group[0], limit, context, in_thread=False)
        if refused is None:
            self.refused_in_a_row = 0
            return True
        reason, error = refused
        self.refused[reason] += 1
        self.refused_in_a_row += 1
        if self.refused_in_a_row >= REFUSED_IN_A_ROW:
            last = f"the last, of group {group[0].group_index}: {error}"
            raise type(error).restore(
                f"{REFUSED_IN_A_ROW} prompts in a row cannot be used; {last}",
                field=error.field, value=error.value, expected=error.expected,
            )  # fmt: skip
        if reason == UNUSABLE or self.args.rollout_max_prompt_len is None:
            log.error("group %s is rejected: %s", group[0].group_index, error)
        await _in_thread(self.source.reject, group, reason)
        return False

    async def _generate_together(self, groups: list[list[Sample]]) -> None:
        await generate_batch(self.state, flatten(groups), self.state.sampling_params)
        for group in groups:
            await finish_group(self.state, group)
        for position, group in enumerate(groups):
            self.undecided = len(groups) - position - 1
            await self._decide(group, list(group))

    async def _collect(self, done: Iterable[asyncio.Task[list[Generated]]]) -> None:
        for task in sorted(done, key=lambda task: self.pending[task][0].group_index or 0):
            group = self.pending.pop(task)
            await self._decide(group, task.result())

    async def _decide(self, leased: list[Sample], group: list[Generated]) -> None:
        samples = flatten(group)
        if len(self.accepted) >= self.target or any(sample.status is Sample.Status.ABORTED for sample in samples):
            await self._give_back(leased, samples)
            return
        self.seen.append(group)
        if self._dropped(leased, group):
            return
        self.accepted.append(group)
        if self.state.plugins.sample_filter is None:
            self._complete(leased, samples)
        elif len(self.accepted) == self.target:
            await self._filter_and_complete()

    def _dropped(self, leased: list[Sample], group: list[Generated]) -> bool:
        """Returns whether the dynamic filter drops the group, which is rejected then."""
        if self.state.plugins.dynamic_filter is None:
            return False
        verdict = DynamicFilterOutput.of(self.state.plugins.dynamic_filter(self.args, group))
        if verdict.kept(self._is_short()):
            self.dropped_in_a_row = 0
            return False
        reason = verdict.reason or "filtered"
        self.dropped[reason] += 1
        self.dropped_in_a_row += 1
        if self.dropped_in_a_row % DROPPED_IN_A_ROW == 0:
            log.warning(
                "rollout %s: the dynamic filter has dropped the last %s groups (%s); it goes on until %s are accepted, "
                "or --rollout-timeout-seconds have passed",
                self.rollout_id, self.dropped_in_a_row, reason, self.target,
            )  # fmt: skip
        self._write(self.source.reject, leased, reason)
        return True

    def _is_short(self) -> bool:
        """Returns whether another group would have to be leased in place of a dropped one."""
        return len(self.accepted) + len(self.pending) + self.undecided < self.target

    async def _filter_and_complete(self) -> None:
        # The filter sees all groups of the iteration, so nothing is completed before it.
        assert self.state.plugins.sample_filter is not None
        self.accepted.sort(key=_first_index)
        await _in_thread(self.state.plugins.sample_filter, self.args, self.accepted)
        for group in self.accepted:
            samples = flatten(group)
            self._complete(samples, samples)

    def _complete(self, leased: list[Sample], samples: list[Sample]) -> None:
        self._write(self.source.complete, samples, leased)
        if self.call is not None:
            self.call.advance()

    def _write(self, function: Callable[..., Any], *args: Any) -> None:
        write = asyncio.create_task(_in_thread(function, *args))
        write.add_done_callback(self._wake_if_failed)
        self.writes.append(write)

    def _wake_if_failed(self, write: asyncio.Task[None]) -> None:
        # Wakes `_next_done`: no other task may be left to end, as the group of a failed call stays leased.
        if not write.cancelled() and write.exception() is not None:
            self.done.put_nowait(write)

    def _check_writes(self) -> None:
        for write in [write for write in self.writes if write.done()]:
            self.writes.remove(write)
            write.result()

    async def _give_back(self, leased: list[Sample], samples: list[Sample]) -> None:
        self.given_back += 1
        if self.args.partial_rollout and len(samples) == len(leased):
            for sample in samples:
                sample.metadata.setdefault("start_rollout_id", self.rollout_id)
            await _in_thread(self.source.add_samples, [samples])
        else:
            await _in_thread(self.source.give_back, [leased])

    async def _give_back_the_rest(self) -> None:
        if not self.pending:
            return
        custom = self.state.plugins.generate is not None
        # Requests of a user's function have ids that are not known here: then all are aborted.
        abort_all = self.call is None or custom
        pending: set[asyncio.Task[Any]] = set(self.pending)
        late, deadline = pending, time.monotonic() + ABORT_SECONDS
        while late and time.monotonic() < deadline:
            # Repeated, because an abort that overtakes its request finds nothing to end.
            await self.state.fleet.abort(None if abort_all else sorted(self.call.open_requests))  # type: ignore[union-attr]
            _, late = await asyncio.wait(pending, timeout=ABORT_AGAIN_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        for task, group in self.pending.items():
            failed = task.cancelled() or task.exception() is not None
            await self._give_back(group, [] if failed else flatten(task.result()))
        self.pending.clear()

    def _output(self) -> RolloutFnTrainOutput:
        self.accepted.sort(key=_first_index)
        if self.state.plugins.all_samples_process is not None:
            self.state.plugins.all_samples_process(self.args, self.seen, self.source.get_samples)
        metrics: dict[str, Any] = {
            f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self.dropped.items()
        }
        metrics["rollout/prompt_too_long"] = self.refused[TOO_LONG]
        if self.refused[UNUSABLE]:
            metrics["rollout/prompt_unusable"] = self.refused[UNUSABLE]
        metrics["rollout/aborted_groups"] = self.given_back
        return RolloutFnTrainOutput(samples=self.accepted, metrics=metrics)  # type: ignore[arg-type]


def _first_index(group: list[Generated]) -> int:
    return flatten(group)[0].index or 0


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    waiting: list[Awaitable[None]] = list(tasks)
    await asyncio.gather(*waiting)
