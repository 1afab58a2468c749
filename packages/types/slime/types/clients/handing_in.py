"""Encodes groups that a worker hands in, in as few calls and messages as their size allows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from google.protobuf.message import Message

from slime.types.clients.buffer_records import CHUNK_BYTES, chunks
from slime.types.codec import sample_pieces
from slime.types.errors import InvalidField
from slime.types.sample import Sample
from slime.types.sample.validate import of_sample
from slime.types.wire.encoded import MessagePieces
from slime.v1 import buffer_pb2

# Groups of one call together; a larger one is a call of its own.
CALL_BYTES = 16 << 20


def messages_of(header: Message, samples: Sequence[Sample]) -> Iterator[bytes]:
    """Yields the encoded messages of a group: header, samples, commit.

    A message costs about a millisecond, so a small group is one message.
    """
    for message in _pieces_of(header, samples):
        yield message.join()


def _pieces_of(header: Message, samples: Sequence[Sample]) -> Iterator[MessagePieces]:
    request = type(header)
    encoded = header.SerializeToString()
    message = MessagePieces([encoded], len(encoded))
    for number, chunk in enumerate(chunks(_encoded(samples), _size_of, CHUNK_BYTES)):
        if number:
            yield message
            message = MessagePieces([], 0)
        message.add_list(request, "samples", chunk)
    commit = request(commit=True).SerializeToString()  # type: ignore[call-arg]
    yield MessagePieces([*message.pieces, commit], message.size + len(commit))


def _encoded(samples: Sequence[Sample]) -> Iterator[MessagePieces]:
    for position, sample in enumerate(samples):
        try:
            yield sample_pieces(sample)
        except InvalidField as error:
            raise of_sample(error, position) from None


def _size_of(message: MessagePieces) -> int:
    return message.size


@dataclass
class CompletingCall:
    """A call that completes groups. first: position of its first group; parts: those of all its groups."""

    first: int
    count: int
    parts: list[MessagePieces]

    def messages(self) -> Iterator[bytes]:
        """Yields encoded CompleteGroupsRequests."""
        for parts in chunks(self.parts, _size_of, CHUNK_BYTES):
            message = MessagePieces([], 0)
            message.add_list(buffer_pb2.CompleteGroupsRequest, "parts", parts)
            yield message.join()

    @contextmanager
    def naming_groups(self) -> Iterator[None]:
        """Makes the errors of the call name groups by their position among all calls."""
        try:
            yield
        except InvalidField as error:
            raise _renumbered(error, self.first, alone=self.count == 1) from None


def calls_of(groups: Sequence[tuple[str, Sequence[Sample]]], writer: buffer_pb2.Writer) -> Iterator[CompletingCall]:
    """Yields the calls that complete groups of (lease token, samples), in order.

    A call with no parts is for one group that is too large to be held in memory twice. Raises InvalidField, which names
    the group and the sample, for a value that cannot be encoded.
    """
    call, size = CompletingCall(0, 0, []), 0
    for position, (token, samples) in enumerate(groups):
        parts: list[MessagePieces] = []
        added = 0
        with CompletingCall(position, 1, []).naming_groups():
            for part in _pieces_of(buffer_pb2.CompleteGroupRequest(writer=writer, lease_token=token), samples):
                parts.append(part)
                added += part.size
                if added > CALL_BYTES:
                    parts = []
                    break
        if call.count and (not parts or size + added > CALL_BYTES):
            yield call
            call, size = CompletingCall(position, 0, []), 0
        if not parts:
            yield CompletingCall(position, 1, [])
            call = CompletingCall(position + 1, 0, [])
            continue
        call.parts += parts
        call.count += 1
        size += added
    if call.count:
        yield call


def _renumbered(error: InvalidField, first: int, *, alone: bool) -> InvalidField:
    def name(text: str) -> str:
        if alone:
            return f"groups[{first}].{text}"
        return re.sub(r"^groups\[(\d+)\]", lambda found: f"groups[{first + int(found[1])}]", text)

    return InvalidField(name(error.field), error.value, error.expected, name(error.message))
