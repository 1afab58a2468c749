"""Large tensors move from messages to a store and come back the same; faults on the way are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slime.types import Sample
from slime.types.blobs import INLINE_BYTES, BlobReader, BlobWriter, detach, digests, resolver, tensors
from slime.types.codec import sample_from_proto, sample_to_proto
from slime.types.errors import InvalidField, NotFound
from slime.v1 import sample_pb2

arrays = st.sampled_from(("?", "u1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
trees = st.recursive(
    st.none() | st.floats() | st.text(st.characters(exclude_categories=["Cs"]), max_size=4) | st.binary() | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Samples with tensors in every field that holds some, of any size from 0."""
    prompt, response = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    floats = st.none() | hnp.arrays(np.float32, response)
    experts = st.sampled_from(("u1", "<i2", "<i4", "<i8")).flatmap(
        lambda dtype: hnp.arrays(dtype, (max(0, prompt + response - 1), 2, 1))
    )
    sizes = draw(st.none() | hnp.arrays(np.int64, response, elements=st.integers(0, 3)))
    return Sample(
        tokens=draw(hnp.arrays(np.int32, prompt + response)),
        response_length=response,
        loss_mask=draw(st.none() | hnp.arrays(np.uint8, response, elements=st.integers(0, 1))),
        rollout_log_probs=draw(floats),
        teacher_log_probs=draw(floats),
        rollout_top_p_token_offsets=None if sizes is None else np.concatenate([[0], np.cumsum(sizes)]),
        rollout_top_p_token_ids=None if sizes is None else draw(hnp.arrays(np.int32, int(sizes.sum()))),
        rollout_routed_experts=draw(st.none() | experts),
        multimodal_inputs=draw(st.none() | st.fixed_dictionaries({"images": trees})),
        multimodal_train_inputs=draw(st.none() | st.fixed_dictionaries({"pixels": trees})),
    )


class MemoryBlobs(BlobWriter, BlobReader):
    """Both sides in one process; counts the blobs of each call."""

    name = "memory"

    def __init__(self, inline_bytes: int = INLINE_BYTES) -> None:
        super().__init__(inline_bytes)
        self.held: list[int] = []
        self.asked: list[int] = []

    def hold(self, blobs: Any) -> list[Any]:
        self.held.append(len(blobs))
        return list(blobs)

    def read(self, wanted: Any) -> list[Any]:
        self.asked.append(len(wanted))
        return self.find(wanted)


def kinds(message: sample_pb2.Sample) -> list[str | None]:
    return [tensor.WhichOneof("data") for tensor in tensors([message])]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(samples(), st.integers(1, 24))
def test_any_sample_survives_the_way_through_references(sample: Sample, inline_bytes: int) -> None:
    store = MemoryBlobs(inline_bytes)
    whole, message = sample_to_proto(sample), sample_to_proto(sample)
    lost = detach([message], store, owner=0)
    large = [tensor.inline for tensor in tensors([whole]) if len(tensor.inline) >= inline_bytes]
    assert lost == sum(map(len, large)) and kinds(message).count("reference") == len(large)
    message = sample_pb2.Sample.FromString(message.SerializeToString())
    assert sample_from_proto(message, resolve=resolver([message], store)) == sample_from_proto(whole) == sample
    store.release(0)
    assert store.kept_bytes() == 0


def test_what_is_below_the_threshold_stays_in_the_message() -> None:
    store = MemoryBlobs()
    numbers = INLINE_BYTES // 4
    message = sample_to_proto(
        Sample(
            tokens=np.zeros(numbers - 1, np.int32),
            rollout_log_probs=np.zeros(numbers, np.float32),
            multimodal_inputs={"images": [np.zeros(numbers - 1, np.float32), np.ones(numbers, np.float32)]},
        )
    )
    assert detach([message], store, owner=0) == 2 * INLINE_BYTES
    assert message.tokens.WhichOneof("data") == "inline"
    assert message.rollout_log_probs.WhichOneof("data") == "reference"
    assert sorted(kinds(message), key=str) == ["inline", "inline", "reference", "reference"]
    assert message.ByteSize() < 3 * INLINE_BYTES


def test_samples_with_the_same_image_share_a_blob_and_are_read_in_one_call() -> None:
    store = MemoryBlobs()
    image = np.arange(INLINE_BYTES, dtype=np.uint8)
    messages = [sample_to_proto(Sample(multimodal_train_inputs={"image": image})) for _ in range(8)]
    detach(messages, store, owner=0)
    assert store.held == [1] and store.kept_bytes() == INLINE_BYTES
    resolve = resolver(messages, store)
    assert store.asked == [1]
    for message in messages:
        inputs = sample_from_proto(message, resolve=resolve).multimodal_train_inputs
        assert inputs is not None
        read = inputs["image"]
        np.testing.assert_array_equal(read, image)
        read[0] = 7  # an array of its own
    assert image[0] == 0


def test_a_blob_lives_as_long_as_one_of_its_owners() -> None:
    store = MemoryBlobs()
    (first,) = store.put([b"both"], owner=1)
    assert store.put([b"both", b"second"], owner=2)[0] == first
    assert store.held == [1, 1]
    store.release(1)
    assert store.find([first.sha256]) == [b"both"]
    store.release(2)
    assert store.kept_bytes() == 0
    with pytest.raises(NotFound, match=f"no blob {first.sha256.hex()} in the store memory"):
        store.find([first.sha256])


def test_bytes_of_another_digest_or_length_and_another_store_are_refused() -> None:
    store = MemoryBlobs(inline_bytes=1)
    message = sample_to_proto(Sample(tokens=np.array([1, 2, 3])))
    detach([message], store, owner=0)

    class Altering(MemoryBlobs):
        def read(self, wanted: Any) -> list[Any]:
            return [b"\0" + data[1:] for data in store.read(wanted)]

    with pytest.raises(InvalidField, match="reference.sha256: got .* the digest of the bytes that were stored"):
        resolver([message], Altering())

    longer = sample_pb2.Sample.FromString(message.SerializeToString())
    longer.tokens.reference.length += 4
    with pytest.raises(InvalidField, match="tokens.reference.length: got 16, expected 12"):
        sample_from_proto(longer, resolve=resolver([longer], store))

    message.tokens.reference.store = "elsewhere"
    with pytest.raises(InvalidField, match="reference.store: got elsewhere, expected memory"):
        resolver([message], store)


def test_digests_are_in_the_order_of_the_blobs() -> None:
    blobs = [bytes([number]) * 5000 for number in range(20)]
    assert digests(blobs) == [digests([blob])[0] for blob in blobs]
