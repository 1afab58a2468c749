"""Encoded messages are put together and taken apart as protobuf does it."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.types import Sample
from slime.types.codec import encode_sample, sample_pieces
from slime.types.wire.encoded import MessagePieces, encode_list, places_of, varint
from slime.v1 import buffer_pb2, sample_pb2

NUM_GPUS = 0
GROUP = buffer_pb2.CompleteGroupRequest

encoded_samples = st.builds(
    lambda index, tokens, response: encode_sample(Sample(index=index, tokens=tokens, response=response)),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**31 - 1), max_size=60),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
)
# Fields that this version does not know, of every kind.
unknown_fields = st.builds(
    lambda number, kind, value, text: (
        varint(number << 3 | kind) + {0: varint(value), 1: b"8 bytes.", 2: varint(len(text)) + text, 5: b"four"}[kind]
    ),
    st.integers(5, 2**29 - 1),
    st.sampled_from([0, 1, 2, 5]),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=150),
)
known_fields = st.builds(
    lambda token, commit: GROUP(lease_token=token, commit=commit).SerializeToString(), st.text("ab"), st.booleans()
)


@settings(deadline=None)
@given(st.lists(encoded_samples.map(lambda sample: (sample,)) | unknown_fields | known_fields, max_size=6), st.binary())
def test_the_places_of_a_list_are_those_that_protobuf_finds(fields: list, before: bytes) -> None:
    samples = [field[0] for field in fields if isinstance(field, tuple)]
    data = b"".join(encode_list(GROUP, "samples", field) if isinstance(field, tuple) else field for field in fields)
    assert [data[start:end] for start, end in places_of(GROUP, "samples", data)] == samples
    assert [sample_pb2.Sample.FromString(each) for each in samples] == list(GROUP.FromString(data).samples)
    # A message inside of others is taken apart where it lies.
    inside = before + data + before
    places = places_of(GROUP, "samples", inside, len(before), len(before) + len(data))
    assert [inside[start:end] for start, end in places] == samples


@settings(deadline=None, max_examples=300)
@given(st.lists(encoded_samples, max_size=3), st.data())
def test_bytes_that_protobuf_takes_are_taken_with_as_many_samples(samples: list[bytes], data: st.DataObject) -> None:
    changed = bytearray(encode_list(GROUP, "samples", samples))
    for _ in range(data.draw(st.integers(0, 3)) if changed else 0):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    received = bytes(changed[: data.draw(st.integers(0, len(changed)))])
    try:
        expected = len(GROUP.FromString(received).samples)
    except DecodeError:
        return
    try:
        assert len(places_of(GROUP, "samples", received)) == expected
    except DecodeError as error:
        assert "wire type 3" in str(error) or "wire type 4" in str(error)


@pytest.mark.parametrize(
    "data",
    [b"\x1a\x05abc", b"\x1a", b"\x1a" + b"\xff" * 10, b"\x09short", b"\x25abc", b"\x02\x00", b"\x1b\x1c", b"\x08"],
    ids=["cut short", "no length", "no end", "8 bytes", "4 bytes", "field 0", "group", "no value"],
)
def test_bytes_that_are_no_fields_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        places_of(GROUP, "samples", data)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=40), max_size=4), st.binary(max_size=5))
def test_pieces_are_joined_to_the_message_that_they_are_of(token_lists: list[list[int]], header: bytes) -> None:
    samples = [
        Sample(tokens=tokens, response="x" * len(tokens), loss_mask=np.ones(len(tokens), np.uint8), response_length=3)
        for tokens in token_lists
    ]
    pieces = MessagePieces([header], len(header))
    pieces.add_list(GROUP, "samples", map(sample_pieces, samples))
    assert pieces.join() == header + encode_list(GROUP, "samples", map(encode_sample, samples))
    assert pieces.size == len(pieces.join())
