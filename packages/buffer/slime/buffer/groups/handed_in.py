"""Groups that workers hand in: each is a lease's token, samples and a commit, in one message or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from slime.types.errors import InvalidField
from slime.v1 import sample_pb2

# Limits of a call with several groups: they are in memory at once, and other calls wait for their transaction.
MOST_GROUPS = 4096
MOST_BYTES = 64 << 20


@dataclass
class HandedIn:
    """The samples that a worker hands in for the group of a lease."""

    token: str
    samples: list[sample_pb2.Sample]


def read_group(messages: Iterator[Any], taken: Callable[[int], None], limit: int) -> HandedIn:
    """Reads a stream of one group.

    messages: CompleteGroupRequest or ReturnGroupRequest. taken: called with the bytes of each. limit: bytes of a group.
    Raises InvalidField for a larger group, and for a stream that does not end with its commit.
    """
    group = _next_group(messages, taken, limit)
    if group is None:
        raise _no_commit()
    if next(messages, None) is not None:
        raise InvalidField("commit", "a message after the one with commit", "commit in the last message")
    return group


def read_groups(parts: Iterator[Any], taken: Callable[[int], None], limit: int) -> list[HandedIn]:
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


def _next_group(messages: Iterator[Any], taken: Callable[[int], None], limit: int) -> HandedIn | None:
    """Reads up to a commit; returns None where there is no further message."""
    group, size = None, 0
    for message in messages:
        group = group or HandedIn(message.lease_token, [])
        size += message.ByteSize()
        if size > limit:
            raise InvalidField(
                "samples", f"more than {limit} bytes", f"a group of at most {limit >> 20} MiB (--max-group-mb)"
            )
        taken(message.ByteSize())
        group.samples.extend(message.samples)
        if message.commit:
            return group
    if group is not None:
        raise _no_commit()
    return None


def _no_commit() -> InvalidField:
    return InvalidField("commit", False, "true in the last message of the stream: nothing was stored")
