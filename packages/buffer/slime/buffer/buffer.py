"""The buffer of one directory: its parts, the order in which they are called, and how calls wait.

    prompts -> leases -> batches, over a store (state) and payloads (samples)

It knows Python values and encoded samples; `service.py` puts it on the wire.
"""

from __future__ import annotations

import dataclasses
import fcntl
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

from slime.buffer.batches import Batches
from slime.buffer.detached import DetachedSteps
from slime.buffer.evaluation import EvaluationSets, read_evaluation_files
from slime.buffer.filters import BufferFilter
from slime.buffer.leases import Leased, Leases
from slime.buffer.place import place_lines, restore_place
from slime.buffer.prompts import Prompts
from slime.buffer.runs import Runs, Writer
from slime.buffer.samples import samples_of
from slime.buffer.settings import BufferSettings
from slime.buffer.sources.base import Columns, Prompt
from slime.buffer.sources.dataset import Dataset, read_dataset
from slime.buffer.store.base import Group, State
from slime.buffer.store.blobs import FilePayloads
from slime.buffer.store.sqlite import SqliteStore
from slime.types.blobs import BlobWriter
from slime.types.errors import DeadlineExceeded, InvalidField, InvalidSetting, NotFound, Unavailable
from slime.types.vision import IMAGE
from slime.v1 import sample_pb2

T = TypeVar("T")
PAGE = 64
PART_BYTES = 1 << 20


class Buffer:
    """Opens, or makes, the directory of `settings`. Thread-safe. Raises ConfigError for files it cannot use.

    clock: wall-clock seconds, for leases. blobs: where large tensors of a step go, for readers that know the store.
    """

    def __init__(
        self, settings: BufferSettings, *, clock: Callable[[], float] = time.time, blobs: BlobWriter | None = None
    ) -> None:
        self.settings = settings
        self._closing = False
        dataset = _read_prompts(settings)
        evaluation = read_evaluation_files(settings)
        buffer_filter = None
        if settings.buffer_filter_path:
            buffer_filter = BufferFilter(settings.buffer_filter_path, SimpleNamespace(**dataclasses.asdict(settings)))
        self._directory = _Directory(settings.buffer_dir)
        try:
            power = settings.buffer_durability == "power"
            self.store = SqliteStore(self._directory.path / "state.sqlite", synchronous="FULL" if power else "NORMAL")
            try:
                self.payloads = FilePayloads(self._directory.path / "payloads", fsync=power)
                self.payloads.sweep(self.store.payload_names())
                self.runs = Runs(self.store)
                self.prompts = Prompts(self.store, dataset, settings.n_samples_per_prompt)
                if settings.data_place is not None:
                    restore_place(settings.data_place, self.store, self.prompts, self.payloads)
                self.leases = Leases(
                    self.store,
                    self.payloads,
                    self.prompts,
                    default_seconds=settings.lease_seconds,
                    reward_required=not settings.allow_missing_rewards,
                    buffer_filter=buffer_filter,
                    clock=clock,
                )
                self.batches = Batches(self.store, self.payloads, release_committed=settings.release_committed)
                self.detached = None if blobs is None else DetachedSteps(self.batches, blobs)
                self.evaluation = EvaluationSets(self.store, evaluation, settings.n_samples_per_eval_prompt)
            except BaseException:
                self.store.close()
                raise
        except BaseException:
            self._directory.close()
            raise

    def end_waits(self) -> None:
        """Lets calls that wait end with Unavailable, now and from now on."""
        self._closing = True
        self.wake()

    def close(self) -> None:
        self.store.close()
        self._directory.close()

    def open_run(self, run_id: str, last_committed_step: int) -> tuple[Writer, int]:
        """(the new writer, the next step)."""
        with self.store.transaction():
            writer = self.runs.raise_incarnation(run_id)
            self.leases.end_all()
            released = self.batches.rewind(last_committed_step)
            next_step = self.batches.next_step()
        self._delete(released)
        if self.detached is not None:
            self.detached.release()
        return writer, next_step

    def add_prompts(self, prompts: Sequence[Prompt], *, key: str, dataset: str) -> tuple[int, int, bool]:
        rows = self.evaluation.rows_of_file(dataset)
        return self.prompts.add(prompts, key=key, dataset=dataset, evaluation_rows=rows)

    def lease(
        self, writer: Writer, max_groups: int, *, ttl: float, wait: float, worker: str, active: Callable[[], bool]
    ) -> list[Leased]:
        """Waits up to `wait` seconds for the first group; empty where none came."""

        def attempt() -> list[Leased] | None:
            with self.store.transaction():
                self.runs.check(writer)
                return self.leases.lease(max_groups, ttl, worker) or None

        return self._wait(attempt, wait, active) or []

    def renew(self, writer: Writer, tokens: Sequence[str], ttl: float) -> list[str]:
        with self.store.transaction():
            self.runs.check(writer)
            return self.leases.renew(tokens, ttl)

    def complete(self, writer: Writer, token: str, samples: Sequence[sample_pb2.Sample]) -> bool:
        return self.leases.complete(token, samples, lambda: self.runs.check(writer))

    def give_back(self, writer: Writer, token: str, samples: Sequence[sample_pb2.Sample]) -> None:
        self.leases.give_back(token, samples, lambda: self.runs.check(writer))

    def reject(self, writer: Writer, token: str, reason: str) -> None:
        with self.store.transaction():
            self.runs.check(writer)
            self.leases.reject(token, reason)

    def seal(
        self,
        writer: Writer,
        step: int,
        num_groups: int,
        *,
        metrics: Mapping[str, float] | None = None,
        wait: float,
        active: Callable[[], bool],
    ) -> bytes:
        """Raises DeadlineExceeded where `num_groups` groups were not complete in time."""
        if step < 0:
            raise InvalidField("step", step, "at least 0")

        def attempt() -> bytes | None:
            with self.store.transaction():
                self.runs.check(writer)
                return self.batches.seal(step, num_groups, metrics)

        sealed = self._wait(attempt, wait, active)
        if sealed is None:
            have = self.store.count(State.COMPLETED)
            raise DeadlineExceeded(
                f"step {step}: {have} of {num_groups} groups were complete after {wait:g} s",
                field="num_groups",
                value=have,
                expected=f"{num_groups} completed groups",
            )
        return sealed

    def store_plan(self, writer: Writer, step: int, plan_json: str) -> str:
        with self.store.transaction():
            self.runs.check(writer)
            return self.batches.store_plan(step, plan_json)

    def plan(self, step: int, *, wait: float, active: Callable[[], bool]) -> str:
        """Raises DeadlineExceeded, or NotFound where `wait` is 0, while there is none."""
        plan = self._wait(lambda: self.batches.plan(step), wait, active)
        if plan is None:
            error = DeadlineExceeded if wait else NotFound
            raise error(f"step {step} has no plan after {wait:g} s", field="step", value=step, expected="a stored plan")
        return plan

    def acknowledge(self, writer: Writer, step: int) -> None:
        with self.store.transaction():
            self.runs.check(writer)
            self.batches.acknowledge(step)
        if self.detached is not None:
            self.detached.release(step)

    def commit(self, writer: Writer, step: int) -> None:
        with self.store.transaction():
            self.runs.check(writer)
            released = self.batches.commit(step)
        self._delete(released)
        if self.detached is not None:
            self.detached.release(step)

    def place(self, step: int) -> Iterator[bytes]:
        """The file of the place in the data after `step`, in parts of about `PART_BYTES`."""
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
        """By group index, page by page: what changes meanwhile is seen as it is when its page is read.

        Raises NotFound where one of `indexes` is not there, whatever its state.
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

    def samples(self, group: Group) -> list[sample_pb2.Sample]:
        """Samples of a group as it was read some time ago, or as it is now where its payload has been replaced."""
        try:
            return samples_of(group, self.payloads)
        except NotFound:
            (now,) = self.store.groups(indexes=[group.group_index])
            if now.payload == group.payload:
                raise
            return samples_of(now, self.payloads)

    def expire(self) -> None:
        with self.store.transaction():
            self.leases.expire()

    def wake(self) -> None:
        """Lets calls that wait look at whether their client is still there."""
        with self.store.changed:
            self.store.changed.notify_all()

    def _wait(self, attempt: Callable[[], T | None], seconds: float, active: Callable[[], bool]) -> T | None:
        """The first result of `attempt` that is not None, tried again after each change, for up to `seconds`."""
        if not 0 <= seconds < threading.TIMEOUT_MAX:
            raise InvalidField("wait_seconds", seconds, "a number of seconds, at least 0")
        deadline = time.monotonic() + seconds
        with self.store.changed:
            while True:
                if self._closing:
                    raise Unavailable("the buffer is stopping")
                # An attempt for a client that went away would lease groups to nobody.
                result = attempt() if active() else None
                left = deadline - time.monotonic()
                if result is not None or left <= 0 or not active():
                    return result
                # An expiry changes nothing until somebody looks.
                expiry = self.leases.seconds_to_expiry()
                self.store.changed.wait(left if expiry is None else min(left, expiry + 0.001))

    def _delete(self, payloads: Sequence[str]) -> None:
        for name in payloads:
            self.payloads.delete(name)


def _read_prompts(settings: BufferSettings) -> Dataset | None:
    if not settings.prompt_data or not settings.rollout_global_dataset:
        return None
    images = settings.multimodal_keys.get(IMAGE)
    columns = Columns(settings.input_key, settings.label_key, settings.metadata_key, settings.tool_key, images)
    return read_dataset(settings.prompt_data, columns, shuffle=settings.rollout_shuffle, seed=settings.rollout_seed)


class _Directory:
    """A directory that one process uses at a time; without a path, a temporary one that goes with `close`."""

    def __init__(self, path: str | None) -> None:
        self.temporary = path is None
        self.path = Path(path) if path is not None else Path(tempfile.mkdtemp(prefix="slime-buffer-"))
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / "lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InvalidSetting(
                f"--buffer-dir {self.path} is in use by another slime-buffer",
                field="--buffer-dir",
                value=str(self.path),
                expected="a directory of its own for each buffer",
            ) from None

    def close(self) -> None:
        self._lock.close()
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)
