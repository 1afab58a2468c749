"""Encoded messages put together from encoded ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# Kind of field on the wire.
_LENGTH_FIRST = 2


@dataclass
class MessagePieces:
    """An encoded message in pieces, arrays among them, which are copied once: where the outermost message is joined.

    size: of all pieces, in bytes.
    """

    pieces: list[Any]
    size: int

    def add_list(self, message: Any, name: str, encoded: Iterable[MessagePieces]) -> None:
        """Adds a repeated field `name` of `message` with these messages."""
        tag = tag_of(message, name)
        for each in encoded:
            length = varint(each.size)
            self.pieces += (tag, length, *each.pieces)
            self.size += len(tag) + len(length) + each.size

    def join(self) -> bytes:
        return b"".join(self.pieces)


def encode_list(message: Any, name: str, encoded: Iterable[bytes]) -> bytes:
    """Returns an encoded `message` whose repeated field `name` has these encoded messages."""
    tag = tag_of(message, name)
    return b"".join(part for each in encoded for part in (tag, varint(len(each)), each))


def tag_of(message: Any, name: str) -> bytes:
    """Returns the tag of a field with texts, bytes or messages."""
    return varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_FIRST)


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
