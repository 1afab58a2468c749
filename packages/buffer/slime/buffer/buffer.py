"""One buffer: calls its parts in order, inside transactions, and lets calls wait.

    prompts -> leases -> steps, over a store (state) and payloads (samples)

It knows Python values and encoded samples; `service.py` puts it on the wire.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace

from slime.buffer.detached import DetachedSteps
from slime.buffer.filters import BufferFilter
from slime.buffer.groups.evaluation import EvaluationSets, read_evaluation_files
from slime.buffer.groups.handed_in import HandedIn
from slime.buffer.groups.leases import Filtered, Leased, Leases
from slime.buffer.groups.place import place_lines, restore_place
from slime.buffer.groups.prompts import Prompts
from slime.buffer.groups.quarantine import Quarantine
from slime.buffer.groups.run_lock import RunLock, WriterId
from slime.buffer.groups.samples import samples_of
from slime.buffer.groups.steps import MAX_STEP, Steps
from slime.buffer.groups.validation import CompletionRules
from slime.buffer.maintenance.strays import set_strays_aside
from slime.buffer.settings import BufferSettings
from slime.buffer.sources.base import Columns
from slime.buffer.sources.dataset import Dataset, read_dataset
from slime.buffer.store.base import Group, State, Wait
from slime.buffer.store.opening import open_storage
from slime.buffer.waits import COMPLETED, READY, Caller, Waits
from slime.types.blobs import BlobWriter
from slime.types.errors import DataLoss, DeadlineExceeded, InvalidField, NotFound, counted
from slime.types.models.vision import IMAGE
from slime.types.pace import TrainerPace
from slime.v1 import sample_pb2

PAGE = 64
PART_BYTES = 1 << 20
# Calls that may wait at a time. Even if every rank of a large job waits in GetPlan, threads are left for other calls.
WAITING_CALLS = 512


class Buffer:
    """Opens or creates the storage of `settings`. Thread-safe. Raises ConfigError for files that it cannot use.

    clock: wall-clock seconds, for leases. blobs: where large tensors of a step go, for readers that know the store.
    standby: called to wait while another server uses --buffer-store; StandbyEnded is raised once it returns true.
    existing: create no buffer, and raise MissingFile if there is none.
    """

    def __init__(
        self,
        settings: BufferSettings,
        *,
        clock: Callable[[], float] = time.time,
        blobs: BlobWriter | None = None,
        standby: Wait | None = None,
        existing: bool = False,
    ) -> None:
        self.settings = settings
        self.waits = Waits(WAITING_CALLS)
        dataset = _read_prompts(settings)
        evaluation = read_evaluation_files(settings)
        buffer_filter = None
        if settings.buffer_filter_path:
            buffer_filter = BufferFilter(settings.buffer_filter_path, SimpleNamespace(**dataclasses.asdict(settings)))
        self._storage = open_storage(settings, standby=standby, existing=existing)
        self.store, self.payloads = self._storage.store, self._storage.payloads
        try:
            set_strays_aside(self.store, self.payloads)
            self.run_lock = RunLock(self.store)
            self.prompts = Prompts(self.store, dataset, settings.n_samples_per_prompt)
            if settings.data_place is not None:
                restore_place(settings.data_place, self.store, self.prompts, self.payloads)
            self.leases = Leases(
                self.store,
                self.payloads,
                self.prompts,
                wake=self.waits.wake,
                on_damage=lambda group, error: self.quarantine.damaged(group, error),
                default_seconds=settings.lease_seconds,
                rules=CompletionRules(
                    reward_required=not settings.allow_missing_rewards,
                    scalar_reward=settings.scalar_rewards,
                    reward_key=settings.reward_key,
                    vocab_size=settings.max_token_id and settings.max_token_id + 1,
                    log_probs_required=settings.log_probs_required,
                    text_only=settings.text_only,
                    nuclei=settings.nuclei,
                ),
                buffer_filter=buffer_filter,
                clock=clock,
            )
            self.steps = Steps(self.store, self.payloads, release_committed=settings.release_committed is not False)
            self.quarantine = Quarantine(
                self.store, self.payloads, self.steps, lambda: self.waits.wake(COMPLETED, WAITING_CALLS)
            )
            self.quarantine.check((State.READY, State.LEASED, State.COMPLETED, State.SEALED))
            self.detached = None if blobs is None else DetachedSteps(self.steps, blobs)
            self.evaluation = EvaluationSets(self.store, evaluation, settings.n_samples_per_eval_prompt)
        except BaseException:
            self._storage.close()
            raise

    def end_waits(self) -> None:
        """Ends waiting calls with Unavailable, now and from now on."""
        self.waits.close()

    def close(self) -> None:
        self._storage.close()

    def open_run(self, run_id: str, last_committed_step: int) -> tuple[WriterId, int]:
        """Starts a new incarnation; returns (its writer, the next step). See OpenRun in buffer.proto."""
        with self.store.transaction():
            writer = self.run_lock.raise_incarnation(run_id)
            self.leases.end_all()
            released = self.steps.rewind(last_committed_step)
            next_step = self.steps.next_step()
        self._delete(released)
        # A replayed group may have been damaged since it was trained on.
        self.quarantine.check((State.SEALED,))
        if self.detached is not None:
            self.detached.release()
        # Writers of the previous incarnation are refused from now on, and others may lease its groups.
        self.waits.wake_all()
        return writer, next_step

    def add_prompts(self, templates: Sequence[bytes], *, key: str, dataset: str) -> tuple[int, int, bool]:
        """Returns (number added, first group index, whether `key` was known). templates: see `encode_prompt`."""
        rows = self.evaluation.rows_of_file(dataset)
        added = self.prompts.add(templates, key=key, dataset=dataset, evaluation_rows=rows)
        self.waits.wake(READY, added[0])
        return added

    def lease(
        self,
        writer: WriterId,
        max_groups: int,
        *,
        ttl: float,
        wait: float,
        worker: str,
        caller: Caller,
        pace: TrainerPace | None = None,
        request: str = "",
    ) -> list[Leased]:
        """Leases groups, waiting up to `wait` seconds for the first; returns none if none came or `pace` admits none.

        request: a name of this call; if the call is repeated, it gets the same groups.
        """

        def next_step() -> int:
            return 0 if pace is None else self.steps.next_to_seal()

        def attempt(filtered: Filtered | None = None) -> list[Leased] | None:
            with self.store.transaction():
                self.run_lock.check(writer)
                if request and (earlier := self.leases.leased_for(request)):
                    return earlier
                # Payloads that an attempt listed are still needed if its transaction failed.
                self.leases.unneeded = []
                leased = self.leases.lease(max_groups, ttl, worker, pace, next_step(), request, filtered)
                unneeded, self.leases.unneeded = self.leases.unneeded, []
            self._delete(unneeded)
            return leased or None

        def attempt_filtered() -> list[Leased] | None:
            assert self.leases.buffer_filter is not None
            # In turn, so that no two calls choose among the same groups.
            with self.leases.buffer_filter.turn():
                with self.store.transaction():
                    self.run_lock.check(writer)
                    if request and (earlier := self.leases.leased_for(request)):
                        return earlier
                    waiting = self.leases.waiting(max_groups, pace, next_step())
                return attempt(self.leases.filtered(waiting))

        tried = attempt if self.leases.buffer_filter is None else attempt_filtered
        # An expired lease is ended by the next call that looks for groups.
        return self.waits.wait(READY, tried, wait, caller, self.leases.seconds_to_expiry) or []

    def renew(self, writer: WriterId, tokens: Sequence[str], ttl: float) -> list[str]:
        """Returns the tokens whose lease has ended."""
        with self.store.transaction():
            self.run_lock.check(writer)
            return self.leases.renew(tokens, ttl)

    def complete(self, writer: WriterId, handed_in: Sequence[HandedIn]) -> list[bool]:
        """Completes groups, see `Leases.complete`; returns for each whether its token had completed it before."""
        return self.leases.complete(handed_in, lambda: self.run_lock.check(writer))

    def give_back(self, writer: WriterId, handed_in: HandedIn) -> None:
        self.leases.give_back(handed_in, lambda: self.run_lock.check(writer))

    def reject(self, writer: WriterId, token: str, reason: str) -> None:
        with self.store.transaction():
            self.run_lock.check(writer)
            payload = self.leases.reject(token, reason)
        # A step may have waited for this group.
        self.waits.wake(COMPLETED)
        self._delete([] if payload is None else [payload])

    def requeue(self, writer: WriterId, worker: str, *, unsealed: bool) -> int:
        """Makes groups ready again, see `Leases.requeue`; returns their number."""
        with self.store.transaction():
            self.run_lock.check(writer)
            count, unneeded = self.leases.requeue(worker, unsealed=unsealed)
        self._delete(unneeded)
        return count

    def drop(self, indexes: Sequence[int], reason: str, *, keep: bool) -> list[int]:
        """Takes groups out of the run, see `Quarantine.drop`. Returns the steps that have to be sealed again."""
        with self.store.transaction():
            steps, unneeded = self.quarantine.drop(indexes, reason, keep=keep)
        # A step may have waited for one of them.
        self.waits.wake(COMPLETED, len(indexes))
        self._delete(unneeded)
        if steps and self.detached is not None:
            self.detached.release()
        return steps

    def seal(
        self,
        writer: WriterId,
        step: int,
        num_groups: int,
        *,
        metrics: Mapping[str, float] | None = None,
        pace: TrainerPace | None = None,
        wait: float,
        caller: Caller,
    ) -> bytes:
        """Seals `step`, waiting up to `wait` seconds for `num_groups` groups; returns an encoded SealStepResponse.

        Raises DeadlineExceeded if too few groups were complete in time.
        """
        if not 0 <= step <= MAX_STEP:
            raise InvalidField("step", step, f"0 to {MAX_STEP}")

        def attempt() -> bytes | None:
            with self.store.transaction():
                self.run_lock.check(writer)
                if pace is not None:
                    # A group whose worker is gone must not hold up the step.
                    self.leases.expire()
                self.steps.unneeded = []
                sealed = self.steps.seal(step, num_groups, self.quarantine.check_sizes, metrics, pace)
                if sealed is None and pace is None:
                    caller.changes_needed = num_groups - self.store.count(State.COMPLETED)
                unneeded, self.steps.unneeded = self.steps.unneeded, []
            self._delete(unneeded)
            return sealed

        next_expiry = (lambda: None) if pace is None else self.leases.seconds_to_expiry
        sealed = self.waits.wait(COMPLETED, attempt, wait, caller, next_expiry)
        if sealed is None:
            have = self.store.count(State.COMPLETED)
            raise DeadlineExceeded(
                f"step {step}: {have} of {counted(num_groups, 'group was', 'groups were')} complete when the wait "
                "ended",
                field="num_groups",
                value=have,
                expected=counted(num_groups, "completed group"),
            )
        return sealed

    def store_plan(self, writer: WriterId, step: int, plan_json: str) -> str:
        with self.store.transaction():
            self.run_lock.check(writer)
            stored = self.steps.store_plan(step, plan_json)
        self.waits.wake(("plan", step), WAITING_CALLS)
        return stored

    def plan(self, step: int, *, wait: float, caller: Caller) -> str:
        """Returns the plan of `step`. Raises DeadlineExceeded, or NotFound if `wait` is 0, while there is none."""
        plan = self.waits.wait(("plan", step), lambda: self.steps.plan(step), wait, caller)
        if plan is None:
            error = DeadlineExceeded if wait else NotFound
            raise error(f"step {step} has no plan yet", field="step", value=step, expected="a stored plan")
        return plan

    def read_step(
        self, step: int, positions: Sequence[int], blob_store: str, *, leave_damaged: bool = False
    ) -> Iterator[list[bytes]]:
        """Reads a step through `Steps.read`, or through `DetachedSteps.read` for readers that know its store.

        If samples cannot be read, sets their groups aside and unseals the step, unless `leave_damaged`, and raises
        DataLoss.
        """
        try:
            if self.detached is not None and blob_store == self.detached.blobs.name:
                yield from self.detached.read(step, positions)
            else:
                yield from self.steps.read(step, positions)
        except DataLoss:
            known = None if leave_damaged else self.store.step(step)
            for group in [] if known is None else self.store.groups(indexes=known.group_indexes):
                problem = self.quarantine.problem(group)
                if problem is not None:
                    with self.store.transaction():
                        self.quarantine.damaged(group, problem)
            raise

    def acknowledge(self, writer: WriterId, step: int) -> None:
        with self.store.transaction():
            self.run_lock.check(writer)
            self.steps.acknowledge(step)
        if self.detached is not None:
            self.detached.release(step)

    def commit(self, writer: WriterId, step: int) -> None:
        with self.store.transaction():
            self.run_lock.check(writer)
            released = self.steps.commit(step)
        self._delete(released)
        if self.detached is not None:
            self.detached.release(step)

    def reopen(self, writer: WriterId, last_step: int) -> None:
        """Makes `last_step` the last acknowledged step, for a trainer that continues from the state after it."""
        with self.store.transaction():
            self.run_lock.check(writer)
            self.steps.reopen(last_step)
        # A group may have been damaged since it was trained on.
        self.quarantine.check((State.SEALED,))
        if self.detached is not None:
            self.detached.release()

    def place(self, step: int) -> Iterator[bytes]:
        """Yields the file with the place in the data after `step`, in parts of about `PART_BYTES`."""
        part = b""
        for line in place_lines(self.store, self.prompts, self.payloads, step):
            part += line
            if len(part) >= PART_BYTES:
                yield part
                part = b""
        yield part

    def groups(
        self, states: Sequence[State], indexes: Sequence[int], *, after: int | None, limit: int
    ) -> Iterator[Group]:
        """Yields groups by index, page by page; each group as it is when its page is read.

        Raises NotFound if one of `indexes` does not exist, in whatever state.
        """
        wanted = sorted(set(indexes)) if indexes else None
        if wanted:
            found = {group.group_index for group in self.store.groups(indexes=wanted)}
            missing = [index for index in wanted if index not in found]
            if missing:
                raise NotFound(f"no group {missing[0]}", field="group_indexes", value=missing[0])
        left = limit or None
        while left is None or left > 0:
            with self.store.transaction():
                self.leases.expire()
            size = PAGE if left is None else min(PAGE, left)
            page = self.store.groups(states=states, indexes=wanted, after=after, limit=size)
            yield from page
            if len(page) < size:
                return
            after = page[-1].group_index
            left = None if left is None else left - len(page)

    def samples(self, group: Group) -> tuple[Group, list[sample_pb2.Sample]]:
        """Returns a group that was read before, with its samples.

        If the samples have been replaced meanwhile, the group is returned as it is now; if they were released or are
        damaged, without samples.
        """
        try:
            return group, samples_of(group, self.payloads)
        except DataLoss as error:
            with self.store.transaction():
                current = self.quarantine.damaged(group, error)
        try:
            return current, samples_of(current, self.payloads)
        except DataLoss:
            return current, []

    def expire(self) -> None:
        """Ends the leases whose time has passed."""
        with self.store.transaction():
            self.leases.expire()

    def _delete(self, payloads: Sequence[str]) -> None:
        for name in payloads:
            self.payloads.delete(name)


def _read_prompts(settings: BufferSettings) -> Dataset | None:
    if not settings.prompt_data or not settings.rollout_global_dataset:
        return None
    images = settings.multimodal_keys.get(IMAGE)
    columns = Columns(settings.input_key, settings.label_key, settings.metadata_key, settings.tool_key, images)
    return read_dataset(settings.prompt_data, columns, shuffle=settings.rollout_shuffle, seed=settings.rollout_seed)
