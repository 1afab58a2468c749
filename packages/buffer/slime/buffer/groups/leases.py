"""Leases: the right of one worker to work on a group until a deadline.

A lease ends by completion, return, rejection, expiry, or a new incarnation of the run. The calls of its holder are
idempotent: repeated with the same token they change nothing. A lease whose time has passed is lost whether or not
somebody else has leased the group; it is ended, and counted, by the next call that looks for waiting groups.
"""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from slime.buffer.filters import BufferFilter
from slime.buffer.groups.handed_in import HandedIn
from slime.buffer.groups.pacing import Deadlines, oldest_version, unsealed_groups
from slime.buffer.groups.prompts import Prompts
from slime.buffer.groups.samples import expand, samples_of
from slime.buffer.groups.summaries import encode_summaries, oldest_of
from slime.buffer.groups.validation import ANY_TRAINER, CompletionRules, check_samples
from slime.buffer.store.base import NO_LEASE, NO_PAYLOAD, Group, Payloads, State, Store
from slime.buffer.waits import COMPLETED, READY
from slime.types.codec import sample_from_proto, sample_to_proto
from slime.types.errors import DataLoss, InvalidField, LeaseLost, Unavailable
from slime.types.pace import TrainerPace
from slime.types.sample.validate import is_untrainable
from slime.v1 import sample_pb2

# Longest lease that a worker may ask for: a dead worker's group must come back some day.
LONGEST_LEASE = 7 * 86400.0
# Separates the name of a request from the rest of a token.
REQUEST_END = "."
# Limit of one call, because other calls wait while it runs.
MOST_GROUPS = 16384


@dataclass
class Leased:
    """A leased group. samples: as they were last returned, or new. seconds: until the lease expires."""

    group: Group
    samples: list[sample_pb2.Sample]
    seconds: float


class Waiting(NamedTuple):
    """Groups that wait, with their samples, and the most of them that a call may lease."""

    most: int
    groups: list[tuple[Group, list[sample_pb2.Sample]]]


class Filtered(NamedTuple):
    """The groups that the filter chose, with the samples that it gave them, and those that it dropped."""

    chosen: list[tuple[Group, list[sample_pb2.Sample]]]
    dropped: list[Group]


class Leases:
    def __init__(
        self,
        store: Store,
        payloads: Payloads,
        prompts: Prompts,
        *,
        default_seconds: float,
        rules: CompletionRules = ANY_TRAINER,
        wake: Callable[[str, int], None],
        on_damage: Callable[[Group, DataLoss], Group],
        buffer_filter: BufferFilter | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """wake: called with a topic of `waits` and the number of groups for it. on_damage: called with a group whose
        samples cannot be read; returns the group as it is then."""
        self.store = store
        self.payloads = payloads
        self.prompts = prompts
        self.default_seconds = default_seconds
        self.rules = rules
        self.wake = wake
        self.on_damage = on_damage
        self.buffer_filter = buffer_filter
        # Payloads of groups that the filter dropped, to be deleted once the transaction is over.
        self.unneeded: list[str] = []
        # Wall-clock time, because leases outlive a restart of the buffer.
        self.clock = clock

    def lease(
        self,
        max_groups: int,
        ttl_seconds: float,
        worker: str,
        pace: TrainerPace | None = None,
        next_step: int = 0,
        request: str = "",
        filtered: Filtered | None = None,
    ) -> list[Leased]:
        """Leases up to `max_groups` groups: those that wait, lowest index first, then new ones. May return none.

        request: the prefix of their tokens, by which a repeated call finds them. filtered: takes, of the groups that
        wait, only those that the filter chose.

        pace: lease no more groups than can be trained on in time from `next_step` on; a group that was returned with
        tokens too old for that starts over. Inside a transaction.
        """
        seconds = self.seconds(ttl_seconds)
        max_groups, deadlines = self._room(max_groups, pace, next_step)
        if not max_groups:
            return []
        taken = self._first(max_groups) if filtered is None else self._chosen(filtered, max_groups)
        taken += [(group, samples_of(group, self.payloads)) for group in self.prompts.draw(max_groups - len(taken))]
        if pace is not None and deadlines is not None:
            taken = [(group, self._in_time(group, samples, pace, deadlines)) for group, samples in taken]
        for group, _ in taken:
            group.state = State.LEASED
            group.token = f"{request}{REQUEST_END if request else ''}{secrets.token_urlsafe(24)}"
            group.attempt += 1
            self.store.update_groups(
                [group.group_index],
                state=group.state,
                token=group.token,
                attempt=group.attempt,
                worker=worker,
                expires_at=self.clock() + seconds,
                weight_version=group.weight_version,
            )
        return [Leased(group, samples, seconds) for group, samples in taken]

    def _room(self, max_groups: int, pace: TrainerPace | None, next_step: int) -> tuple[int, Deadlines | None]:
        """Returns how many groups may be leased now, and with a pace the deadlines of the others."""
        if max_groups < 1:
            raise InvalidField("max_groups", max_groups, "at least 1")
        # Without a bound, one call would draw the whole dataset, epoch after epoch.
        max_groups = min(max_groups, MOST_GROUPS)
        self.expire()
        if pace is None:
            return max_groups, None
        known = [group.weight_version for group in unsealed_groups(self.store, pace.weight_version)]
        deadlines = Deadlines(pace, known, next_step)
        return deadlines.room(max_groups), deadlines

    def leased_for(self, request: str) -> list[Leased]:
        """Returns the groups that `lease` gave for `request` and that are still leased. Inside a transaction."""
        found = [self._read(group) for group in self.store.groups_of_request(request)]
        now = self.clock()
        return [Leased(group, samples, max(0.0, (group.expires_at or now) - now)) for group, samples in found]

    def _in_time(
        self, group: Group, samples: list[sample_pb2.Sample], pace: TrainerPace, deadlines: Deadlines
    ) -> list[sample_pb2.Sample]:
        """Records the version of the oldest token that the group will have; returns the samples to continue from."""
        begun = oldest_version(samples)
        group.weight_version = pace.weight_version if begun is None else min(begun, pace.weight_version)
        if deadlines.admit(group.weight_version) or begun is None:
            return samples
        group.weight_version = pace.weight_version
        deadlines.admit(group.weight_version)
        indexes = range(group.first_sample, group.first_sample + group.num_samples)
        return expand(group.template, group.group_index, indexes)

    def _first(self, count: int) -> list[tuple[Group, list[sample_pb2.Sample]]]:
        ready = self.store.groups(states=[State.READY], limit=count)
        return [self._read(group) for group in ready]

    def _read(self, group: Group) -> tuple[Group, list[sample_pb2.Sample]]:
        try:
            return group, samples_of(group, self.payloads)
        except DataLoss as error:
            group = self.on_damage(group, error)
            return group, samples_of(group, self.payloads)

    def waiting(self, max_groups: int, pace: TrainerPace | None, next_step: int) -> Waiting:
        """Returns the groups that wait, and the number of which the filter may choose. Inside a transaction."""
        count, _ = self._room(max_groups, pace, next_step)
        groups = self.store.groups(states=[State.READY]) if count else []
        return Waiting(count, [self._read(group) for group in groups])

    def filtered(self, waiting: Waiting) -> Filtered:
        """Calls the filter: outside a transaction, because the function of the user may take long or call the buffer.
        Raises PluginError."""
        if not waiting.groups:
            return Filtered([], [])
        assert self.buffer_filter is not None
        candidates = [[sample_from_proto(sample) for sample in samples] for _, samples in waiting.groups]
        choice = self.buffer_filter.choose(candidates, waiting.most)
        groups = [group for group, _ in waiting.groups]
        chosen = [(groups[position], list(map(sample_to_proto, each))) for position, each in choice.chosen.items()]
        return Filtered(chosen, [groups[position] for position in choice.dropped])

    def _chosen(self, filtered: Filtered, count: int) -> list[tuple[Group, list[sample_pb2.Sample]]]:
        """Rejects the groups that the filter dropped; returns up to `count` of those that it chose. Leaves out groups
        that another call has changed since they were read."""
        seen = [*filtered.dropped, *(group for group, _ in filtered.chosen)]
        now = {group.group_index: group for group in self.store.groups(indexes=[g.group_index for g in seen])}
        unchanged = {index for group in seen if now.get(index := group.group_index) == group}
        dropped = [group for group in filtered.dropped if group.group_index in unchanged]
        self.store.update_groups(
            [group.group_index for group in dropped], state=State.REJECTED, reject_reason="buffer_filter", **NO_PAYLOAD
        )
        self.unneeded += [group.payload for group in dropped if group.payload is not None]
        return [(group, samples) for group, samples in filtered.chosen if group.group_index in unchanged][:count]

    def seconds(self, ttl_seconds: float) -> float:
        """Returns the time of a lease: as asked for, or the default for 0. Raises InvalidField."""
        if not 0 <= ttl_seconds <= LONGEST_LEASE:
            raise InvalidField(
                "ttl_seconds", ttl_seconds, f"seconds, at most {LONGEST_LEASE:g} (a week); 0 for the buffer's default"
            )
        return ttl_seconds or self.default_seconds

    def renew(self, tokens: Sequence[str], ttl_seconds: float) -> list[str]:
        """Extends leases; returns the tokens whose lease has ended. Inside a transaction."""
        seconds = self.seconds(ttl_seconds)
        if len(tokens) > MOST_GROUPS:
            raise InvalidField("tokens", len(tokens), f"at most {MOST_GROUPS} in a call")
        self.expire()
        lost = []
        for token in tokens:
            group = self.store.group_of_token(token)
            if group is None:
                lost.append(token)
            else:
                self.store.update_groups([group.group_index], expires_at=self.clock() + seconds)
        return lost

    def complete(self, handed_in: Sequence[HandedIn], authorise: Callable[[], None]) -> list[bool]:
        """Completes groups, all of them or none; returns for each whether its token had done so before.

        authorise: raises StaleWriter if the caller may not write. Raises LeaseLost, InvalidField, OutOfSpace.
        """
        return self._hand_in(handed_in, authorise, "complete")

    def give_back(self, handed_in: HandedIn, authorise: Callable[[], None]) -> None:
        """Makes the group READY with these samples as its own; without any, as it was leased."""
        self._hand_in([handed_in], authorise, "return")

    def _hand_in(self, handed_in: Sequence[HandedIn], authorise: Callable[[], None], ended_by: str) -> list[bool]:
        # Checked first, so that no payload is written for a lost lease.
        with self.store.lock:
            authorise()
            leased = [self._leased(each.token, ended_by) for each in handed_in]
        # Outside the transaction: it takes long, and others need not wait for it.
        checked = [
            _checked(group, each, ended_by, self.rules, f"groups[{position}]." if len(handed_in) > 1 else "")
            for position, (group, each) in enumerate(zip(leased, handed_in, strict=True))
        ]
        columns = [of_group for of_group, _ in checked]
        stored = [(group, *each) for group, each in zip(leased, checked, strict=True) if group is not None and each[1]]
        try:
            names = self.payloads.write([(group.group_index, parts) for group, _, parts in stored])
            for (_, of_group, _), name in zip(stored, names, strict=True):
                of_group["payload"] = name
            self.payloads.flush(names)
            with self.store.transaction():
                authorise()
                # A lease may have ended meanwhile.
                ended = [
                    self._end_leased(each.token, ended_by, of_group)
                    for each, of_group in zip(handed_in, columns, strict=True)
                ]
                count = sum(group is not None for group in ended)
                # A step may also have waited for a group that is given back.
                for topic in [COMPLETED] if ended_by == "complete" else [READY, COMPLETED]:
                    if count:
                        self.wake(topic, count)
        except Unavailable:
            # The state may name the payload: a connection that breaks does not say whether the transaction took place.
            raise
        except BaseException:
            self._delete(columns)
            raise
        for group, of_group in zip(ended, columns, strict=True):
            if group is None:
                self._delete([of_group])
            elif group.payload is not None and "payload" in of_group:
                self.payloads.delete(group.payload)
        return [group is None for group in ended]

    def _end_leased(self, token: str, ended_by: str, columns: Mapping[str, Any]) -> Group | None:
        """Ends a lease with what was handed in; returns the group as it was, None if its lease was ended before."""
        group = self._leased(token, ended_by)
        if group is not None:
            state = State.COMPLETED if ended_by == "complete" else State.READY
            self._end(group, ended_by, state=state, **columns)
        return group

    def _delete(self, columns: Iterable[Mapping[str, Any]]) -> None:
        for of_group in columns:
            if "payload" in of_group:
                self.payloads.delete(of_group["payload"])

    def reject(self, token: str, reason: str) -> str | None:
        """Rejects a group; returns the payload to delete once the transaction is over. Inside a transaction.

        Raises LeaseLost.
        """
        group = self._leased(token, "reject")
        if group is None:
            return None
        self._end(group, "reject", state=State.REJECTED, reject_reason=reason or "unspecified", **NO_PAYLOAD)
        return group.payload

    def _leased(self, token: str, ended_by: str) -> Group | None:
        """Returns the group leased under `token`; None where that lease was ended by the same call before."""
        group = self.store.group_of_token(token) if token else None
        if group is not None and group.expires_at is not None and group.expires_at > self.clock():
            return group
        ended = self.store.group_of_ended_token(token) if token else None
        if ended is not None and ended.ended_by == ended_by:
            return None
        end = "the lease has expired, or never was" if ended is None else f"the lease ended by {ended.ended_by}"
        raise LeaseLost(f"{end}: lease again", field="lease_token", value=token, expected="a lease that runs")

    def _end(self, group: Group, ended_by: str, **columns: object) -> None:
        self.store.update_groups(
            [group.group_index], ended_token=group.token, ended_by=ended_by, **(NO_LEASE | columns)
        )

    def expire(self) -> int:
        """Ends the leases whose time has passed; returns their number. Inside a transaction."""
        due = self.store.due_leases(self.clock())
        if due:
            self.store.update_groups(due, state=State.READY, **NO_LEASE)
            self.store.put("expired_leases", self.store.get("expired_leases", 0) + len(due))
            self.wake(READY, len(due))
            # A step may have waited for one of them.
            self.wake(COMPLETED, len(due))
        return len(due)

    def requeue(self, worker: str, *, unsealed: bool) -> tuple[int, list[str]]:
        """Makes the groups that `worker` has leased READY, and with `unsealed` also those that any worker completed or
        rejected and that no step has counted. Inside a transaction.

        Returns their number, and the payloads to delete once the transaction is over.
        """
        leased = [group for group in self.store.groups(states=[State.LEASED]) if group.worker == worker]
        self.store.update_groups([group.group_index for group in leased], state=State.READY, **NO_LEASE)
        ended = []
        if unsealed:
            found = self.store.groups(states=[State.COMPLETED, State.REJECTED], in_no_step=True)
            # Groups that the buffer's filter or an operator rejected, which may be complete ones, stay rejected.
            by_worker = {State.COMPLETED: "complete", State.REJECTED: "reject"}
            ended = [group for group in found if group.ended_by == by_worker[group.state]]
            columns = dict.fromkeys(("ended_token", "ended_by", "reject_reason", "summaries", "weight_version"))
            indexes = [group.group_index for group in ended]
            self.store.update_groups(indexes, state=State.READY, **(NO_LEASE | NO_PAYLOAD | columns))
        if count := len(leased) + len(ended):
            self.wake(READY, count)
            # A step may have waited for one of them.
            self.wake(COMPLETED, count)
        return count, [group.payload for group in ended if group.payload is not None]

    def end_all(self) -> None:
        """Ends every lease, as a new incarnation does. Inside a transaction."""
        leased = [group.group_index for group in self.store.groups(states=[State.LEASED])]
        self.store.update_groups(leased, state=State.READY, **NO_LEASE)

    def seconds_to_expiry(self) -> float | None:
        """Returns the seconds until the next lease expires; None if no lease runs."""
        next_expiry = self.store.next_expiry()
        return None if next_expiry is None else max(0.0, next_expiry - self.clock())


def _checked(
    group: Group | None, handed_in: HandedIn, ended_by: str, rules: CompletionRules, prefix: str
) -> tuple[dict[str, Any], list[bytes | memoryview]]:
    """Checks what is handed in for a group; returns columns of its row and the encoded samples.

    Both are empty where there is nothing to store. prefix: of the fields that errors name. Raises InvalidField.
    """
    finished, messages = ended_by == "complete", handed_in.samples
    if group is None or not (messages or finished):
        return {}, []
    try:
        samples = check_samples(group, messages, finished=finished, rules=rules)
    except InvalidField as error:
        if not prefix:
            raise
        field, message = f"{prefix}{error.field}", f"{prefix}{error.message}"
        raise InvalidField(field, error.value, error.expected, message) from None
    # The check may have changed samples that are never trained on.
    parts = [
        message.SerializeToString() if encoded is None or is_untrainable(sample) else encoded
        for message, sample, encoded in zip_longest(messages, samples, handed_in.encoded)
    ]
    columns: dict[str, Any] = {
        "sizes": [len(part) for part in parts],
        "checksums": [zlib.crc32(part) for part in parts],
    }
    if finished:
        columns["summaries"] = encode_summaries(messages, samples)
        if (oldest := oldest_of(samples)) is not None:
            columns["weight_version"] = oldest
    return columns, parts
