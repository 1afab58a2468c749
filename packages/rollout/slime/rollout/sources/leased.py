"""Groups leased from a buffer, until each is completed, rejected or given back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeAlias

from slime.rollout.calls.call import CALL
from slime.rollout.sources.joint_calls import JointCalls
from slime.rollout.sources.wire_names import WireNames
from slime.types import Sample, SampleGroup
from slime.types.errors import DeadlineExceeded, InvalidField, LeaseLost, SlimeError, WrongState, counted

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
CLOSE_SECONDS = 30.0
# So many unusable groups in a row mean that the settings of the run are wrong, not the groups.
REFUSED_IN_A_ROW = 1000
# Groups of more tokens are completed in calls of their own, so that others need not wait for them.
JOINT_TOKENS = 16384
# Maximum number of groups that are not held here and may be leased while looking for one that is (`_regain`).
MOST_STRANGERS = 64


# `render` of slime.rollout.prompts.encoder.PromptEncoder.
Render: TypeAlias = Callable[[Iterable[Sample]], None]


class BufferCalls(Protocol):
    """The methods of `slime.types.clients.BufferClient` that are used here."""

    def lease_groups(self, max_groups: int, ttl_seconds: float, wait_seconds: float, worker_id: str) -> list[Any]: ...
    def renew_leases(self, tokens: list[str], ttl_seconds: float) -> list[str]: ...
    def return_group(self, token: str, samples: list[Sample]) -> None: ...
    def complete_group(self, token: str, samples: list[Sample]) -> bool: ...
    def complete_groups(self, groups: list[tuple[str, list[Sample]]]) -> list[bool]: ...
    def reject_group(self, token: str, reason: str) -> None: ...


@dataclass
class _Lease:
    token: str
    # Keeps the objects alive, so that no other object gets the same id while the lease lasts.
    samples: list[Sample]


class LeasedDataSource:
    """Groups that are leased from a buffer. Thread-safe. Use it as a context manager: at its end, groups still leased
    go back as they were.

    names: the names that samples of the buffer may hold; a group with any other is rejected. render: turns the prompts
    of a group into what the model is sent; a group whose prompt it refuses is rejected. completed: the groups that were
    completed.
    """

    def __init__(
        self,
        buffer: BufferCalls,
        *,
        worker_id: str,
        names: WireNames | None = None,
        render: Render | None = None,
        ttl_seconds: float = 600.0,
        wait_seconds: float = 600.0,
    ) -> None:
        self.buffer = buffer
        self.worker_id = worker_id
        self.names = names
        self.render = render
        self.ttl_seconds = ttl_seconds
        self.wait_seconds = wait_seconds
        self.completed: list[list[Sample]] = []
        self._leases: dict[int, _Lease] = {}
        # By identity: a rollout function may renumber the samples that it was given.
        self._group_of: dict[int, int] = {}
        self._lock = threading.Condition()
        self._calls = 0
        self._refused_in_a_row = 0
        self._closed = threading.Event()
        self._hand_in = _handing_in(buffer, self._closed)
        self._renewer = threading.Thread(target=self._renew, name="lease-renewal", daemon=True)

    def __enter__(self) -> Self:
        self._renewer.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._leases)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Leases up to `num_samples` groups; waits for the first. Raises DeadlineExceeded when none comes, and
        the error of the last group after it had to reject `REFUSED_IN_A_ROW` groups in a row."""
        call = CALL.get()
        deadline = time.monotonic() + self.wait_seconds
        while call is None or not call.cancelled.is_set():
            groups = self._lease(num_samples, max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))
            if groups:
                return groups
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the buffer had no prompt to lease for {self.wait_seconds:g} s; give it --prompt-data "
                    "or add prompts, or raise --rollout-prompt-wait-seconds",
                    field="rollout_prompt_wait_seconds",
                    value=self.wait_seconds,
                    expected="a prompt in the buffer",
                )
        raise ended()

    def _lease(self, num_samples: int, wait_seconds: float, **options: Any) -> list[list[Sample]]:
        with self._calling():
            leased = self.buffer.lease_groups(
                num_samples,
                ttl_seconds=self.ttl_seconds,
                wait_seconds=wait_seconds,
                worker_id=self.worker_id,
                **options,
            )
            groups = [group for lease in leased if (group := self._take(lease)) is not None]
        return [group for group in groups if self._usable(group)]

    def _take(self, lease: Any) -> list[Sample] | None:
        """Returns the samples of a lease; None for a group that is held here already."""
        group: SampleGroup = lease.group
        with self._lock:
            if (held := self._leases.get(group.group_index)) is not None:
                # Its lease expired because it could not be renewed: the work continues under the new lease.
                log.warning("group %s was leased again while it was worked on", group.group_index)
                held.token = lease.token
                return None
            self._leases[group.group_index] = _Lease(lease.token, list(group.samples))
            self._group_of.update((id(sample), group.group_index) for sample in group.samples)
        return group.samples

    def _usable(self, group: list[Sample]) -> bool:
        """Renders the prompt of a group, and returns whether the group can be used.

        Rejects the group, with the reason, if its prompt cannot be rendered or a name in it is unknown to this run.
        """
        error = self._unknown_name(group)
        reason = "" if error is None else f"unknown {error.field.partition('.')[0]}"
        if error is None and self.render is not None:
            try:
                self.render(group)
            except InvalidField as unusable:
                error, reason = unusable, "prompt_unusable"
        if error is None:
            self._refused_in_a_row = 0
            return True
        self._refused_in_a_row += 1
        log.error("group %s is rejected: %s", self.find(group), error)
        self.reject(group, reason)
        if self._refused_in_a_row >= REFUSED_IN_A_ROW:
            raise error
        return False

    def _unknown_name(self, group: list[Sample]) -> SlimeError | None:
        return self.names.refusal(group) if self.names is not None else None

    def add_samples(self, groups: list[list[Sample]]) -> None:
        if self.names is not None:
            self.names.trust(sample for group in groups for sample in group)
        for group in groups:
            self._return(group, list(group))

    def give_back(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            self._return(group, [])

    def _return(self, group: list[Sample], samples: list[Sample]) -> None:
        self._end(self._index(group), lambda lease: self.buffer.return_group(lease.token, samples))

    def reject(self, group: list[Sample], reason: str) -> None:
        self._end(self._index(group), lambda lease: self.buffer.reject_group(lease.token, reason))

    def complete(self, samples: list[Sample], leased: list[Sample] | None = None) -> None:
        """Completes a group. Raises InvalidField for samples that break the contract or belong to no leased group,
        LeaseLost where the lease has ended."""
        self._complete_as(self._index(leased if leased is not None else samples), samples)

    def complete_rest(self, groups: list[list[Sample]]) -> None:
        """Completes the groups that a rollout function returned and did not complete itself.

        Functions may make samples of their own: a group without the index of a leased group takes the place of the next
        one that is left, in order. Padding (group_index -1) is left out. Raises InvalidField for more groups than were
        leased.
        """
        done = {id(sample) for samples in self.completed for sample in samples}
        named: dict[int, list[Sample]] = {}
        unnamed = []
        for group in groups:
            if not group or id(group[0]) in done or group[0].group_index == -1:
                continue
            index = self.find(group)
            if index is None or index in named:
                unnamed.append(group)
            else:
                named[index] = group
        left = [index for index in self.leased_groups() if index not in named]
        if len(unnamed) > len(left):
            most = len(groups) - len(unnamed) + len(left)
            raise InvalidField("samples", len(groups), f"at most {most}, as were leased")
        self._complete_all([*named.items(), *zip(left, unnamed, strict=False)])

    def _complete_all(self, groups: list[tuple[int, list[Sample]]]) -> None:
        """Completes (index, samples) in one call; one by one where the buffer does not take all of them."""
        call = CALL.get()
        if len(groups) > 1:
            with self._calling():
                handed_in = []
                for index, samples in groups:
                    lease = self._leases[index]
                    _fill(lease, index, samples)
                    handed_in.append((lease.token, samples))
                with suppress(LeaseLost, InvalidField):
                    self.buffer.complete_groups(handed_in)
                    for index, samples in groups:
                        self.completed.append(samples)
                        self.forget(index)
                        if call is not None:
                            call.advance()
                    return
        for index, samples in groups:
            self._complete_as(index, samples)
            if call is not None:
                call.advance()

    def _complete_as(self, index: int, samples: list[Sample]) -> None:
        def complete(lease: _Lease) -> None:
            _fill(lease, index, samples)
            if sum(len(sample.tokens) for sample in samples if sample.tokens is not None) <= JOINT_TOKENS:
                self._hand_in((lease.token, samples))
            else:
                self.buffer.complete_group(lease.token, samples)
            self.completed.append(samples)

        self._end(index, complete)

    def leased_groups(self) -> list[int]:
        with self._lock:
            return sorted(self._leases)

    def close(self) -> None:
        """Waits for running calls, then gives back the groups that are left; if that fails, their leases expire."""
        self._closed.set()
        if self._renewer.is_alive():
            self._renewer.join(timeout=CLOSE_SECONDS)
        with self._lock:
            self._lock.wait_for(lambda: self._calls == 0, timeout=CLOSE_SECONDS)
            tokens = [lease.token for lease in self._leases.values()]
            self._leases.clear()
        for token in tokens:
            try:
                self.buffer.return_group(token, [])
            except LeaseLost:
                # The lease has expired and another worker has the group.
                continue
            except SlimeError as error:
                log.warning("%s left to expire: %s", counted(len(tokens), "lease is", "leases are"), error)
                return

    def find(self, group: Sequence[Sample]) -> int | None:
        """Returns the index of the leased group to which these samples belong: by identity, else by group_index."""
        with self._lock:
            for sample in group:
                for index in (self._group_of.get(id(sample)), sample.group_index):
                    if index is not None and index in self._leases:
                        return index
        return None

    def _index(self, group: Sequence[Sample]) -> int:
        index = self.find(group)
        if index is None:
            named = group[0].group_index if group else None
            raise InvalidField("group_index", named, f"one of the leased groups: {self.leased_groups()[:20]}")
        return index

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Surrounds a call to the buffer: `close` waits for it, and none starts afterwards."""
        with self._lock:
            if self._closed.is_set():
                raise ended()
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()

    def _end(self, index: int, call: Callable[[_Lease], Any]) -> None:
        """Makes a call that ends a lease; if the call fails, the lease stays, and `close` gives it back.

        A lease that expired because it could not be renewed is taken again first, unless another worker has the group.
        """
        with self._calling():
            lease = self._leases[index]
            token = lease.token
            try:
                call(lease)
            except LeaseLost:
                # The group may have been leased again while the call was under way, see `_take`.
                if lease.token == token and not self._regain(index):
                    raise
                call(lease)
            self.forget(index)

    def _regain(self, index: int) -> bool:
        """Leases waiting groups until the one at `index`, which is held here, is among them; returns whether it was."""
        strangers: list[str] = []
        try:
            # Waiting groups are leased in the order of their index: nearly all before this one are held here too.
            for _ in range(len(self._leases) + MOST_STRANGERS):
                leased = self.buffer.lease_groups(
                    1, ttl_seconds=self.ttl_seconds, wait_seconds=0.0, worker_id=self.worker_id
                )
                if not leased:
                    return False
                if self._take(leased[0]) is None:
                    if leased[0].group.group_index == index:
                        return True
                else:
                    strangers.append(leased[0].token)
                    self.forget(leased[0].group.group_index)
            return False
        finally:
            for token in strangers:
                self.buffer.return_group(token, [])

    def forget(self, index: int) -> None:
        """Drops a lease that has ended."""
        with self._lock:
            lease = self._leases.pop(index, None)
            for sample in lease.samples if lease is not None else ():
                self._group_of.pop(id(sample), None)

    def _renew(self) -> None:
        while not self._closed.wait(self.ttl_seconds / 3):
            with self._lock:
                tokens = [lease.token for lease in self._leases.values()]
            if tokens:
                try:
                    # A lost lease shows when the group is completed; until then its work may still win.
                    self.buffer.renew_leases(tokens, self.ttl_seconds)
                except SlimeError as error:
                    log.warning("leases could not be renewed: %s", error)


def _handing_in(buffer: BufferCalls, closed: threading.Event) -> JointCalls[tuple[str, list[Sample]]]:
    """Returns what completes (lease token, samples) until `closed`."""
    # It has no reference to the data source, whose samples are freed with it, without Python's collector.

    def check() -> None:
        if closed.is_set():
            raise ended()

    def one(group: tuple[str, list[Sample]]) -> None:
        check()
        buffer.complete_group(*group)

    def several(groups: list[tuple[str, list[Sample]]]) -> None:
        check()
        buffer.complete_groups(groups)

    return JointCalls(one, several)


def _fill(lease: _Lease, index: int, samples: list[Sample]) -> None:
    """Sets group, index and what else a user's function may have left open."""
    for position, sample in enumerate(samples):
        sample.group_index = index
        if sample.index is None and position < len(lease.samples):
            sample.index = lease.samples[position].index
        _finish(sample)


def _finish(sample: Sample) -> None:
    """Sets what a user's function may have left open: a returned sample is completed, and one with an empty response
    is left out of the loss."""
    if sample.status is Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED
    if not sample.response_length and not sample.response and not sample.remove_sample:
        log.warning(
            "sample %s of group %s has an empty response: it is not trained on", sample.index, sample.group_index
        )
        sample.remove_sample = True


def ended() -> WrongState:
    return WrongState("the call of Generate has ended", field="rollout", expected="a running call")
