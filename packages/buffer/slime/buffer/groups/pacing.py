"""Pacing: limits leases, and chooses the groups of a step, so that no sample is older than the trainer accepts.

A group whose oldest token has weight version v must be trained on at step v + K at the latest (K: max_staleness), its
deadline. B groups make a step; with c(d) unsealed groups that are due at step d or before, all can be in time if

    c(d) <= B * (d - s + 1)    for every d >= s, the step that is sealed next

A lease that would break this is not given. With the policy "wait" a step that would break it for later steps is not
sealed until more of the groups that are due are complete. Of the complete groups, a step takes those with the oldest
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slime.buffer.store.base import State, Store
from slime.types.pace import DROP, WAIT, TrainerPace
from slime.types.sample.validate import version_number
from slime.v1 import sample_pb2

STALE = "stale"


class Unsealed(NamedTuple):
    """A group that is leased or complete, with the version of its oldest token."""

    group_index: int
    state: State
    weight_version: int


class Deadlines:
    """The deadlines of unsealed groups, counted in steps from the next one."""

    def __init__(self, pace: TrainerPace, versions: Sequence[int], next_step: int) -> None:
        self._pace = pace
        self._next_step = next_step
        # Number of groups by their deadline; overdue groups count as due now.
        self._due: dict[int, int] = {}
        for version in versions:
            self._add(version)

    def _deadline(self, version: int) -> int:
        return version + self._pace.max_staleness - self._next_step

    def _add(self, version: int) -> None:
        deadline = max(0, self._deadline(version))
        self._due[deadline] = self._due.get(deadline, 0) + 1

    def room(self, most: int) -> int:
        """Returns the number of new groups, up to `most`, that can be trained on in time beside the others."""
        steps = min(self._deadline(self._pace.weight_version) + 1, self._pace.stop_step - self._next_step)
        return max(0, min(most, self._pace.groups_per_step * steps - sum(self._due.values())))

    def admit(self, version: int) -> bool:
        """Adds a group whose oldest token has this version, if all can be trained on in time with it."""
        size, deadline = self._pace.groups_per_step, self._deadline(version)
        if deadline < 0:
            return False
        for step in {deadline, *(step for step in self._due if step > deadline)}:
            if sum(count for due, count in self._due.items() if due <= step) + 1 > size * (step + 1):
                return False
        self._add(version)
        return True


def unsealed_groups(store: Store, newest: int) -> list[Unsealed]:
    """Returns leased and completed groups. newest: stands in for a version that is missing, or too high to exist."""
    return [
        Unsealed(index, state, newest if version is None else min(version, newest))
        for index, state, version in store.weight_versions([State.LEASED, State.COMPLETED])
    ]


def oldest_version(samples: Sequence[sample_pb2.Sample]) -> int | None:
    """Returns the weight version of the oldest token in the samples of a waiting group; None if it has none."""
    named = [version for sample in samples for version in _versions(sample)]
    versions = [number for version in named if (number := version_number(version)) is not None]
    return min(versions, default=None)


def _versions(sample: sample_pb2.Sample) -> Sequence[str]:
    # As `summaries.weight_versions` reads a finished sample: a function of the user may set no spans.
    return [span.weight_version for span in sample.spans] or sample.weight_versions


def choose(
    groups: Sequence[Unsealed], step: int, num_groups: int, pace: TrainerPace
) -> tuple[list[int], list[int]] | None:
    """Returns the indexes of the groups of `step` and of those to reject as too old; None if the step has to wait.

    A group may be overdue because a run resumed with a smaller staleness; it is trained on unless the policy is "drop".
    """
    stale = [g.group_index for g in groups if pace.policy == DROP and g.weight_version + pace.max_staleness < step]
    groups = [group for group in groups if group.group_index not in set(stale)]
    complete = [group for group in groups if group.state is State.COMPLETED]
    taken = sorted(complete, key=lambda group: (group.weight_version, group.group_index))[:num_groups]
    if len(taken) < num_groups or (pace.policy == WAIT and _leaves_too_many(groups, taken, step, pace)):
        return None if not stale else ([], stale)
    return sorted(group.group_index for group in taken), stale


def _leaves_too_many(groups: Sequence[Unsealed], taken: Sequence[Unsealed], step: int, pace: TrainerPace) -> bool:
    """Returns whether later steps could not train on the rest in time, but could if this step waited."""
    for version in sorted({group.weight_version for group in groups}):
        steps_left = max(0, version + pace.max_staleness - step)
        due = sum(group.weight_version <= version for group in groups)
        due_taken = sum(group.weight_version <= version for group in taken)
        if due - due_taken > pace.groups_per_step * steps_left and due_taken < len(taken):
            return True
    return False
