"""Groups that workers hand in: each is a lease's token, samples and a commit, in one message or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from slime.types.errors import InvalidField, counted
from slime.types.rpc.status import unreadable
from slime.types.wire.encoded import places_of
from slime.v1 import buffer_pb2, sample_pb2

# Limits of a call with several groups: they are in memory at once, and other calls wait for their transaction.
MOST_GROUPS = 4096
MOST_BYTES = 64 << 20


@dataclass
class HandedIn:
    """The samples that a worker hands in for the group of a lease. encoded: each as it arrived, or none of them."""

    token: str
    samples: list[sample_pb2.Sample]
    encoded: list[memoryview] = field(default_factory=list)


class GroupPart(NamedTuple):
    """A CompleteGroupRequest or ReturnGroupRequest. encoded: its samples as they arrived; size: its bytes."""

    message: Any
    encoded: list[memoryview]
    size: int


def part_of(message: Any, data: bytes) -> GroupPart:
    """Reads the bytes of a `message`. Raises InvalidField for bytes that are not one."""
    try:
        places, view, parsed = places_of(message, "samples", data), memoryview(data), message.FromString(data)
        if len(places) != len(parsed.samples):
            # Only what is parsed is checked, and the places are what is stored.
            raise DecodeError(f"{counted(len(parsed.samples), 'sample')} in {counted(len(places), 'place')}")
    except DecodeError as error:
        raise unreadable(error) from None
    return GroupPart(parsed, [view[start:end] for start, end in places], len(data))


def parts_of(requests: Iterator[bytes]) -> Iterator[GroupPart]:
    """Yields the parts in the bytes of CompleteGroupsRequests. Raises InvalidField as `part_of` does.

    Each is parsed by itself, so that only its bytes are in memory twice, and in the processor's cache.
    """
    for data in requests:
        try:
            places = places_of(buffer_pb2.CompleteGroupsRequest, "parts", data)
        except DecodeError as error:
            raise unreadable(error) from None
        for start, end in places:
            yield part_of(buffer_pb2.CompleteGroupRequest, data[start:end])


def read_group(parts: Iterator[GroupPart], taken: Callable[[int], None], limit: int) -> HandedIn:
    """Reads a stream of one group.

    taken: called with the bytes of each part. limit: bytes of a group. Raises InvalidField for a larger group, and for
    a stream that does not end with its commit.
    """
    group = _next_group(parts, taken, limit)
    if group is None:
        raise _no_commit()
    if next(parts, None) is not None:
        raise InvalidField("commit", "a message after the one with commit", "commit in the last message")
    return group


def read_groups(parts: Iterator[GroupPart], taken: Callable[[int], None], limit: int) -> list[HandedIn]:
    """Reads groups one after the other, as `read_group` does each. Raises InvalidField, also for too many of them."""
    groups: list[HandedIn] = []
    size = 0

    def held(added: int) -> None:
        nonlocal size
        size += added
        if groups and size > MOST_BYTES:
            most = f"{MOST_BYTES >> 20} MiB"
            raise InvalidField("parts", f"more than {most}", f"groups of at most {most} together, or a single group")
        taken(added)

    while (group := _next_group(parts, held, limit)) is not None:
        groups.append(group)
        if len(groups) > MOST_GROUPS:
            raise InvalidField("parts", f"more than {MOST_GROUPS} groups", f"at most {MOST_GROUPS} in a call")
    if not groups:
        raise InvalidField("parts", "none", "the parts of one group or more")
    return groups


def _next_group(parts: Iterator[GroupPart], taken: Callable[[int], None], limit: int) -> HandedIn | None:
    """Reads up to a commit; returns None where there is no further part."""
    group, size = None, 0
    for message, encoded, added in parts:
        group = group or HandedIn(message.lease_token, [])
        size += added
        if size > limit:
            raise InvalidField(
                "samples", f"more than {limit} bytes", f"a group of at most {limit >> 20} MiB (--max-group-mb)"
            )
        taken(added)
        group.samples.extend(message.samples)
        group.encoded += encoded
        if message.commit:
            return group
    if group is not None:
        raise _no_commit()
    return None


def _no_commit() -> InvalidField:
    return InvalidField("commit", False, "true in the last message of the stream: nothing was stored")
