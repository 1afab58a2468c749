"""Interface of a store: state that changes in transactions, and payloads that never change.

A `Payloads` write is finished before the transaction that names it begins, so a crash leaves at worst a payload that
nothing names, which is set aside when the buffer starts.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

# Waits for the given seconds; returns whether to give up.
Wait = Callable[[float], bool]


class State(enum.StrEnum):
    """The life of a group; see GroupState in buffer.proto."""

    READY = "ready"
    LEASED = "leased"
    COMPLETED = "completed"
    SEALED = "sealed"
    ACKNOWLEDGED = "acknowledged"
    COMMITTED = "committed"
    REJECTED = "rejected"
    QUARANTINED = "quarantined"


@dataclass
class Group:
    """A group, without the summaries of its samples.

    template: an encoded Sample without indexes, from which each sample of the group starts.
    first_sample, num_samples: sample indexes are [first_sample, first_sample + num_samples).
    payload: name of the samples in Payloads, None while they equal the template; sizes: bytes of each sample;
    checksums: CRC-32 of each sample, none if an older version of slime stored them.
    weight_version: version of the group's oldest token, if known.
    ended_token, ended_by: the latest lease that a call of its holder ended ("return", "complete" or "reject"), or that
    a step ended by rejecting the group ("stale").
    """

    group_index: int
    dataset: str
    state: State
    template: bytes
    first_sample: int
    num_samples: int
    payload: str | None = None
    sizes: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()
    worker: str | None = None
    token: str | None = None
    expires_at: float | None = None
    attempt: int = 0
    ended_token: str | None = None
    ended_by: str | None = None
    step: int | None = None
    reject_reason: str | None = None
    weight_version: int | None = None


class CompletedGroup(NamedTuple):
    """The columns that `Steps` reads of all groups of a step, in a fraction of the time that `Group` objects take.

    payload_bytes: the sum of `Group.sizes`; summaries: an encoded SealStepResponse with the summaries of this group's
    samples, once completed; the others are as in `Group`.
    """

    group_index: int
    payload: str | None
    payload_bytes: int
    summaries: bytes | None


# Columns of a group without a lease, and without samples of its own.
NO_LEASE: dict[str, Any] = {"token": None, "expires_at": None, "worker": None}
NO_PAYLOAD: dict[str, Any] = {"payload": None, "sizes": [], "checksums": []}


@dataclass
class Step:
    """One row of `steps`; `state` is SEALED, ACKNOWLEDGED or COMMITTED."""

    step: int
    state: State
    group_indexes: tuple[int, ...]
    plan: str | None = None


class Store(ABC):
    """State of one buffer. Thread-safe: `lock` is held for the length of a transaction; reads outside one are allowed.

    Every method raises DataLoss if the database is damaged, and Unavailable if it does not answer or another server has
    taken over. A transaction that ends with Unavailable may have taken place.

    name: where the state lies, for messages; older: why a database may be older than its payloads, for messages.
    """

    lock: threading.RLock  # type: ignore[valid-type]
    name: str
    older: str

    def check(self) -> None:  # noqa: B027
        """Raises Unavailable if another server has taken over for good."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Makes the writes inside it all or nothing; raises OutOfSpace if the disk is full. Must not be nested."""

    @abstractmethod
    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value that was stored, which must not be changed; `default` if there is none."""

    @abstractmethod
    def put(self, name: str, value: Any) -> None:
        """Stores a JSON value other than None. Inside a transaction, as every write is."""

    @abstractmethod
    def insert_groups(self, groups: Sequence[Group]) -> None: ...

    @abstractmethod
    def update_groups(self, indexes: Iterable[int], **columns: Any) -> None:
        """Sets columns: fields of `Group` except `template`, and `summaries`."""

    @abstractmethod
    def groups(
        self,
        *,
        states: Sequence[State] = (),
        indexes: Sequence[int] | None = None,
        after: int | None = None,
        limit: int = -1,
        in_no_step: bool = False,
    ) -> list[Group]:
        """Returns groups by ascending index; a negative limit means no limit."""

    @abstractmethod
    def completed_groups(self, *, indexes: Sequence[int] | None = None, limit: int = -1) -> list[CompletedGroup]:
        """Returns by ascending index the groups `indexes`, in whatever state, or else the first `limit` that are
        COMPLETED."""

    @abstractmethod
    def sample_counts(self, indexes: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (index, number of stored samples) of groups by ascending index; 0 for one without a payload."""

    @abstractmethod
    def group_of_token(self, token: str) -> Group | None:
        """Returns the group that is leased under `token`."""

    @abstractmethod
    def groups_of_request(self, request: str) -> list[Group]:
        """Returns the groups that are leased under tokens "REQUEST.REST", by ascending index."""

    @abstractmethod
    def group_of_ended_token(self, token: str) -> Group | None: ...

    @abstractmethod
    def due_leases(self, now: float) -> list[int]:
        """Returns indexes of the groups whose lease ends at `now` or before."""

    @abstractmethod
    def next_expiry(self) -> float | None: ...

    @abstractmethod
    def weight_versions(self, states: Sequence[State]) -> list[tuple[int, State, int | None]]:
        """Returns (index, state, weight version) of the groups in these states, by ascending index."""

    @abstractmethod
    def count(self, state: State) -> int: ...

    @abstractmethod
    def counts(self) -> dict[str, int]: ...

    @abstractmethod
    def reject_counts(self) -> dict[str, int]: ...

    @abstractmethod
    def rejected_in_no_step(self) -> list[tuple[int, str]]:
        """Returns (index, reason) of the rejected groups that no step has counted, by ascending index."""

    @abstractmethod
    def payload_bytes(self) -> int: ...

    @abstractmethod
    def payload_names(self) -> set[str]: ...

    @abstractmethod
    def step(self, step: int) -> Step | None: ...

    @abstractmethod
    def steps(self, *, after: int | None = None, upto: int | None = None) -> list[Step]:
        """Returns steps by ascending number, with after < step <= upto."""

    @abstractmethod
    def insert_step(self, step: Step) -> None: ...

    @abstractmethod
    def update_step(self, step: int, **columns: Any) -> None: ...

    @abstractmethod
    def seal_record(self, step: int) -> dict[str, Any]:
        """Returns the metrics and rejections recorded when the step was sealed; empty if there are none."""

    @abstractmethod
    def insert_seal_record(self, step: int, record: dict[str, Any]) -> None: ...

    @abstractmethod
    def delete_step(self, step: int) -> None: ...

    @abstractmethod
    def prompt_batch(self, key: str) -> tuple[int, str | None] | None:
        """Returns (first group index, digest) of the prompts that were added under `key`."""

    @abstractmethod
    def prompt_batches(self) -> list[tuple[str, int, int, str | None]]:
        """Returns (key, number added, first group index, digest) of all prompts that were added under a key."""

    @abstractmethod
    def insert_prompt_batch(self, key: str, added: int, first: int, digest: str | None) -> None: ...

    @abstractmethod
    def evaluation_prompts(self, dataset: str) -> list[bytes]:
        """Returns templates that clients added to an evaluation set, in order."""

    @abstractmethod
    def insert_evaluation_prompts(self, dataset: str, templates: Sequence[bytes]) -> int:
        """Appends templates to an evaluation set; returns the position of the first one."""

    @abstractmethod
    def evaluation_datasets(self) -> list[str]: ...

    @abstractmethod
    def close(self) -> None: ...


class Payloads(ABC):
    """Named byte strings, one for each group, written once. Those that are written together may share a file.

    Every method raises Unavailable if the storage does not answer. name, lost_and_found: where payloads lie, and where
    those that are set aside go, for messages.
    """

    name: str
    lost_and_found: str

    def track(self, names: Iterable[str]) -> None:  # noqa: B027
        """Takes `names` as those of all payloads in use; call it before the first `write`, `delete` or `set_aside`."""

    @abstractmethod
    def write(self, groups: Sequence[tuple[int, Sequence[bytes | memoryview]]]) -> list[str]:
        """Stores a payload for each (group index, parts), the concatenation of the parts; returns their names.

        Raises OutOfSpace, and leaves nothing behind then.
        """

    def flush(self, names: Collection[str]) -> None:  # noqa: B027
        """Makes payloads survive a power cut where that was asked for and `write` does not; call it before the state
        names them. Raises OutOfSpace."""

    @abstractmethod
    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Reads each (offset, length), in bytes. Raises DataLoss if the payload is gone, unreadable or too short."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Returns the size in bytes; None if the payload is gone."""

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Sets one of `names` aside, if it exists; no call finds it afterwards."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Removes a payload, if it exists. A shared file goes with the last of its payloads."""

    @abstractmethod
    def names(self) -> set[str]:
        """Returns the names of all files or objects that hold payloads: what `file_of` returns for their names."""

    def exist(self) -> bool:
        """Returns whether there is any payload."""
        return bool(self.names())

    def delete_unfinished(self) -> None:  # noqa: B027
        """Removes what interrupted writes have left, if such writes leave anything."""

    @abstractmethod
    def owner(self) -> str | None:
        """Returns the id of the store that these payloads belong to, as `claim` has set it; None if it has not."""

    @abstractmethod
    def claim(self, owner: str) -> None:
        """Sets the owner, unless another store has claimed the payloads in the meantime."""
