"""Encoded messages are put together as protobuf does it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.types import Sample
from slime.types.codec import encode_sample, sample_pieces
from slime.types.wire.encoded import MessagePieces, encode_list
from slime.v1 import buffer_pb2

NUM_GPUS = 0
GROUP = buffer_pb2.CompleteGroupRequest


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
