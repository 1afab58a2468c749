"""Steps: the groups that the trainer takes together, until a checkpoint lets the buffer forget them.

    SEALED --acknowledge--> ACKNOWLEDGED --commit--> COMMITTED
       ^------------ rewind (a new incarnation) -----------'

A sealed step keeps its groups and its plan, unless one of its groups leaves the run (`quarantine`). After a crash the
steps behind the last checkpoint are SEALED again, so sealing them returns the same groups and `plan` the same plan: the
trainer replays the same batches.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from slime.buffer.groups.pacing import STALE, choose, unsealed_groups
from slime.buffer.groups.samples import encoded_samples
from slime.buffer.store.base import NO_LEASE, NO_PAYLOAD, CompletedGroup, Group, Payloads, State, Step, Store
from slime.types.errors import InvalidField, NotFound, WrongState
from slime.types.pace import TrainerPace
from slime.types.wire.json_fields import from_json
from slime.v1 import buffer_pb2

log = logging.getLogger(__name__)

# Memory for messages of this size is used again; for larger ones it comes fresh from the system each time.
READ_BYTES = 1 << 20
# More steps than any run has, and far below the limit of 64 bits.
MAX_STEP = 10**12


class StepSample(NamedTuple):
    """A sample of a sealed step: its group, and its position in the group."""

    group: Group
    position: int

    @property
    def size(self) -> int:
        """The size of the encoded sample, in bytes."""
        return self.group.sizes[self.position]


class Steps:
    """The steps of a run, from seal to commit. Every method that changes something is called inside a transaction."""

    def __init__(self, store: Store, payloads: Payloads, *, release_committed: bool) -> None:
        self.store = store
        self.payloads = payloads
        self.release_committed = release_committed
        # Payloads of groups that were rejected as too old, to be deleted once the transaction is over.
        self.unneeded: list[str] = []
        # The step that was sealed last and the answer, until a step is asked for again.
        self._newest: tuple[Step, bytes] | None = None

    def seal(
        self,
        step: int,
        num_groups: int,
        whole: Callable[[Sequence[CompletedGroup]], bool],
        metrics: Mapping[str, float] | None = None,
        pace: TrainerPace | None = None,
    ) -> bytes | None:
        """Returns an encoded SealStepResponse; None if fewer than `num_groups` groups are complete.

        Takes the lowest group indexes, or with `pace` the groups that `pacing.choose` returns. A step that was sealed
        before stays as it is, with the `metrics` of that time. whole: returns whether the samples of all given groups
        exist, and takes groups without samples out of the run.
        """
        if num_groups < 1:
            raise InvalidField("num_groups", num_groups, "at least 1")
        known = self.store.step(step)
        if known is not None and len(known.group_indexes) != num_groups:
            raise InvalidField(
                "num_groups", num_groups, f"{len(known.group_indexes)}, with which step {step} was sealed"
            )
        newest, self._newest = self._newest, None
        if newest is not None and known == newest[0]:
            # The launcher seals a step, and a moment later the trainer asks for it.
            return newest[1]
        if known is not None and whole(groups := self._groups(known)):
            return self._sealed(step, groups)
        if known is None:
            self._check_next(step)
        while (chosen := self._chosen(step, num_groups, pace)) is not None:
            if whole(chosen):
                indexes = tuple(group.group_index for group in chosen)
                self.store.update_groups(indexes, state=State.SEALED, step=step)
                sealed = Step(step, State.SEALED, indexes)
                self.store.insert_step(sealed)
                self._note(step, metrics or {})
                answer = self._sealed(step, chosen)
                self._newest = sealed, answer
                return answer
        return None

    def _chosen(self, step: int, num_groups: int, pace: TrainerPace | None) -> list[CompletedGroup] | None:
        if pace is None:
            groups = self.store.completed_groups(limit=num_groups)
            return groups if len(groups) == num_groups else None
        chosen = choose(unsealed_groups(self.store, step), step, num_groups, pace)
        if chosen is None:
            return None
        taken, stale = chosen
        for group in self.store.groups(indexes=stale):
            ended = {} if group.token is None else {"ended_token": group.token, "ended_by": STALE}
            columns = {"state": State.REJECTED, "reject_reason": STALE} | NO_LEASE | NO_PAYLOAD | ended
            self.store.update_groups([group.group_index], **columns)
            if group.payload is not None:
                self.unneeded.append(group.payload)
        return self.store.completed_groups(indexes=taken) if taken else None

    def _sealed(self, step: int, groups: Sequence[CompletedGroup]) -> bytes:
        extra = buffer_pb2.SealStepResponse(**self.store.seal_record(step)).SerializeToString()
        return b"".join(group.summaries or b"" for group in groups) + extra

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        # A step that was unsealed has a record already, with the groups that were rejected for it.
        known = self.store.seal_record(step)
        rejected = Counter(known.get("rejected", {})) + Counter(self._rejected_since(step))
        record = {"metrics": dict(metrics) or known.get("metrics", {}), "rejected": dict(rejected)}
        if any(record.values()):
            self.store.insert_seal_record(step, record)

    def _rejected_since(self, step: int) -> dict[str, int]:
        """Counts the groups rejected since the previous step was sealed, by reason, and assigns them to this step."""
        # A group may be rejected many steps after groups that were drawn later.
        found = self.store.rejected_in_no_step()
        self.store.update_groups([index for index, _ in found], step=step)
        return dict(Counter(reason for _, reason in found))

    def next_to_seal(self) -> int:
        """Returns the first step after the last sealed one."""
        acknowledged = self.next_step() - 1
        return 1 + max([acknowledged] + [known.step for known in self.store.steps(after=acknowledged)])

    def _check_next(self, step: int) -> None:
        last = self.next_to_seal() - 1
        if step <= last:
            raise WrongState(
                f"step {step} was never sealed and step {last} is over: steps are sealed in order",
                field="step",
                value=step,
                expected=str(last + 1),
            )
        if step > last + 1:
            raise WrongState(
                f"step {step} cannot be sealed before step {last + 1}; a run that begins at a later step passes "
                "last_committed_step to OpenRun",
                field="step",
                value=step,
                expected=str(last + 1),
            )

    def next_step(self) -> int:
        """Returns the first step after the last acknowledged one."""
        return self.store.get("acknowledged_step", -1) + 1

    def store_plan(self, step: int, plan_json: str) -> str:
        """Returns the plan of `step`: the first one that was stored."""
        known = self._step(step)
        if known.plan is not None:
            return known.plan
        from_json(plan_json, "plan_json", dict)
        self.store.update_step(step, plan=plan_json)
        return plan_json

    def unseal(self, steps: Iterable[int]) -> list[int]:
        """Makes the groups of these steps, and of all later ones, COMPLETED again and forgets the steps; returns them.

        Raises WrongState if one of them was trained.
        """
        steps = list(steps)
        if not steps:
            return []
        unsealed = self.store.steps(after=min(steps) - 1)
        for known in unsealed:
            if known.state is not State.SEALED:
                raise WrongState(
                    f"step {known.step} is {known.state}: an earlier one cannot change", field="step", value=known.step
                )
        for known in unsealed:
            self.store.update_groups(known.group_indexes, state=State.COMPLETED, step=None)
            self.store.delete_step(known.step)
        return [known.step for known in unsealed]

    def plan(self, step: int) -> str | None:
        known = self.store.step(step)
        return None if known is None else known.plan

    def acknowledge(self, step: int) -> None:
        known = self._step(step)
        if known.state is State.SEALED:
            self._move(known, State.ACKNOWLEDGED)
            self.store.put("acknowledged_step", max(step, self.next_step() - 1))

    def commit(self, step: int) -> list[str]:
        """Commits every step up to `step`; returns the payloads to delete once the transaction is over.

        Raises WrongState for a step that is not acknowledged.
        """
        if step >= self.next_step():
            raise WrongState(
                f"step {step} is not acknowledged; the last one that is acknowledged is {self.next_step() - 1}",
                field="step",
                value=step,
                expected=f"at most {self.next_step() - 1}",
            )
        released: list[str] = []
        for known in self.store.steps(after=self.committed_step(), upto=step):
            if known.state is not State.ACKNOWLEDGED:
                raise WrongState(
                    f"step {known.step} is {known.state}, expected acknowledged", field="step", value=known.step
                )
            self._move(known, State.COMMITTED)
            if self.release_committed:
                released += [group.payload for group in self._groups(known) if group.payload is not None]
                self.store.update_groups(known.group_indexes, summaries=None, **NO_PAYLOAD)
        self.store.put("committed_step", max(step, self.committed_step()))
        return released

    def committed_step(self) -> int:
        return self.store.get("committed_step", -1)

    def rewind(self, last_committed_step: int) -> list[str]:
        """Makes `last_committed_step` the last committed step; returns payloads as `commit` does.

        Later steps are sealed again, up to the first whose samples were released: its groups start again from their
        prompts. Earlier ones are committed, because the checkpoint holds them.
        """
        if not -1 <= last_committed_step <= MAX_STEP:
            raise InvalidField("last_committed_step", last_committed_step, f"a step from 0 to {MAX_STEP}, or -1")
        for known in self.store.steps(after=self.committed_step(), upto=last_committed_step):
            if known.state is State.SEALED:
                self._move(known, State.ACKNOWLEDGED)
        self._forget_released(last_committed_step)
        self._reopen(last_committed_step)
        return self.commit(last_committed_step)

    def _forget_released(self, last_step: int) -> None:
        """Forgets the steps after `last_step` from the first whose samples were released. Its groups are READY again,
        and those that still have samples COMPLETED."""
        steps = [(known, self._groups(known)) for known in self.store.steps(after=last_step)]
        first = next((n for n, (_, groups) in enumerate(steps) if any(g.payload is None for g in groups)), len(steps))
        for known, groups in steps[first:]:
            released = [group.group_index for group in groups if group.payload is None]
            kept = [group.group_index for group in groups if group.payload is not None]
            forgotten = dict.fromkeys(("step", "weight_version", "ended_token", "ended_by"))
            self.store.update_groups(released, state=State.READY, **(NO_LEASE | forgotten))
            self.store.update_groups(kept, state=State.COMPLETED, step=None)
            self.store.delete_step(known.step)
        if steps[first:]:
            log.warning(
                "step %d and what follows is generated again: the commit of step %d deleted samples",
                steps[first][0].step, self.committed_step(),
            )  # fmt: skip

    def reopen(self, last_step: int) -> None:
        """Makes `last_step` the last acknowledged step, and commits nothing. Raises WrongState as `rewind` does, and if
        `last_step` is not acknowledged."""
        if not -1 <= last_step < self.next_step():
            raise WrongState(
                f"step {last_step} is not acknowledged; the last one that is acknowledged is {self.next_step() - 1}",
                field="last_step", value=last_step, expected=f"-1 to {self.next_step() - 1}",
            )  # fmt: skip
        self._reopen(last_step)

    def _reopen(self, last_step: int) -> None:
        for known in self.store.steps(after=last_step):
            if any(group.payload is None for group in self._groups(known)):
                raise WrongState(
                    f"step {known.step} is committed and its samples were released: it cannot be replayed",
                    field="last_step",
                    value=last_step,
                    expected=f"at least {self.committed_step()}",
                )
            self._move(known, State.SEALED)
        self.store.put("acknowledged_step", last_step)
        self.store.put("committed_step", min(last_step, self.committed_step()))

    def read(self, step: int, positions: Sequence[int]) -> Iterator[list[bytes]]:
        """Returns encoded samples at `positions` of the step's summaries, in that order, in lists of about 1 MiB.

        Raises what `places` raises, when it is called.
        """
        return map(self.encoded, chunks(self.places(step, positions), READ_BYTES))

    def places(self, step: int, positions: Sequence[int]) -> list[StepSample]:
        """Returns each sample at `positions` of the step, with its group and its position there.

        Raises NotFound for a step that is not sealed, InvalidField for a position out of range.
        """
        # Many readers ask for few samples each, so the rows of all groups would cost more than what is read.
        with self.store.lock:
            indexes = self._step(step).group_indexes
            if min(positions, default=-1) >= 0:
                # Groups have a sample or more, so the first positions are those of the first groups.
                indexes = indexes[: max(positions) + 1]
            counts = self.store.sample_counts(indexes)
            ends = list(accumulate(count for _, count in counts))
            for position in positions:
                if not 0 <= position < ends[-1]:
                    released = any(count == 0 for _, count in counts)
                    expected = f"0 to {ends[-1] - 1}" if not released else "a step whose samples were not released"
                    raise InvalidField("positions", position, expected)
            which = [bisect_right(ends, position) for position in positions]
            needed = [counts[number][0] for number in sorted(set(which))]
            groups = {group.group_index: group for group in self.store.groups(indexes=needed)}
        return [
            StepSample(groups[index], position - ends[number] + count)
            for position, number in zip(positions, which, strict=True)
            for index, count in [counts[number]]
        ]

    def encoded(self, places: Sequence[StepSample]) -> list[bytes]:
        """Returns the encoded samples at `places`."""
        # Neighbours in a group are read from its file at once.
        found: list[bytes] = []
        for _, neighbours in groupby(places, lambda place: place.group.group_index):
            group, positions = zip(*neighbours, strict=True)
            found += encoded_samples(group[0], self.payloads, positions)
        return found

    def _groups(self, step: Step) -> list[CompletedGroup]:
        return self.store.completed_groups(indexes=step.group_indexes)

    def _step(self, step: int) -> Step:
        known = self.store.step(step)
        if known is None:
            raise NotFound(f"step {step} is not sealed", field="step", value=step, expected="a sealed step")
        return known

    def _move(self, step: Step, state: State) -> None:
        self.store.update_step(step.step, state=state)
        self.store.update_groups(step.group_indexes, state=state)


def chunks(places: Sequence[StepSample], max_bytes: int) -> Iterator[list[StepSample]]:
    """Yields samples in order, in lists of about `max_bytes`; a larger sample is a list of its own."""
    chunk: list[StepSample] = []
    size = 0
    for place in places:
        if chunk and size + place.size > max_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(place)
        size += place.size
    if chunk:
        yield chunk
