"""Encoded messages put together and taken apart without parsing what they contain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

# Kinds of fields on the wire; messages of proto3 have no others.
_VARINT, _EIGHT_BYTES, _LENGTH_FIRST, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10


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


def places_of(message: Any, name: str, data: bytes, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """Returns where the values of the field `name`, texts, bytes or messages, lie in the encoded `message` at
    data[start:end].

    Raises DecodeError for bytes that are not fields of a message, and for groups, which proto3 does not have.
    """
    wanted = message.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_FIRST
    end = len(data) if end is None else end
    found: list[tuple[int, int]] = []
    while start < end:
        key, start = _read_varint(data, start)
        kind = key & 7 if key > 7 else None  # no field has the number 0
        if kind == _LENGTH_FIRST:
            length, begin = _read_varint(data, start)
            start = begin + length
            if key == wanted:
                found.append((begin, start))
        elif kind == _VARINT:
            _, start = _read_varint(data, start)
        elif kind == _EIGHT_BYTES:
            start += 8
        elif kind == _FOUR_BYTES:
            start += 4
        else:
            raise DecodeError(f"a field of wire type {kind} at byte {start}")
    if start != end:
        raise DecodeError(f"a field ends at byte {start} of {end}")
    return found


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


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns the number at `position`, and the position after it."""
    value = shift = 0
    for byte in data[position : position + _LONGEST_VARINT]:
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise DecodeError(f"a number without an end at byte {position}")
