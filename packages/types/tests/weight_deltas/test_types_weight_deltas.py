"""Deltas of weights: applied bytes are bit for bit those that were encoded; deltas that do not fit are refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.types.errors import DataLoss, InvalidFile, NotAvailable
from slime.types.weight_deltas import encoding
from slime.types.weight_deltas.buckets import (
    ITEM_BYTES,
    VersionDelta,
    apply_tensor,
    encode_tensor,
    read_bucket,
    read_index,
    write_buckets,
    write_index,
)  # fmt: skip
from slime.types.weight_deltas.checksums import CHECKSUMS, find_checksum
from slime.types.weight_deltas.encoding import OPERATIONS, apply, encode

# -0.0, 1.0, infinities, and NaNs with payloads, as bfloat16 and as the upper half of float32.
SPECIAL = (0x0000, 0x8000, 0x3F80, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC1, 0xFFFF)


def about(encoding: str = "xor", checksum: str = "xxh3-128") -> VersionDelta:
    return VersionDelta(4, 3, "a", encoding, checksum)


@st.composite
def versions(draw: Any) -> tuple[str, np.ndarray, np.ndarray]:
    """(dtype, old bytes, new bytes): some or all elements differ, with special values among them."""
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    size, count = ITEM_BYTES[dtype], draw(st.integers(0, 700))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random.integers(0, 256, count * size, np.uint8)
    new = old.copy()
    changed = random.random(count) < draw(st.sampled_from((0.0, 0.003, 0.05, 0.4, 1.0)))
    new.reshape(count, size)[changed] = random.integers(0, 256, (int(changed.sum()), size), np.uint8)
    if size in (2, 4) and count:
        place = draw(st.integers(0, count - 1))
        new.view(f"<u{size}")[place] = draw(st.sampled_from(SPECIAL)) << (8 * (size - 2))
    return dtype, old, new


@given(versions(), st.sampled_from(OPERATIONS), st.sampled_from(CHECKSUMS), st.integers(1, 2000), st.integers(1, 2000))
@settings(max_examples=150, deadline=None)
def test_a_version_arrives_bit_for_bit(
    version: tuple[str, np.ndarray, np.ndarray], encoding: str, checksum: str, max_bytes: int, tensor_bytes: int
) -> None:
    dtype, old, new = version
    delta_of = about(encoding, checksum)
    shape = (len(old) // ITEM_BYTES[dtype],)
    sent = [encode_tensor(delta_of, name, dtype, shape, old, new) for name in ("a", "b", "c")]
    got = []
    for bucket, last in write_buckets(delta_of, sent, max_bytes, tensor_bytes):
        read, tensors = read_bucket(bucket)
        assert read == delta_of
        assert len(tensors) == 1 or len(tensors) * len(old) <= tensor_bytes
        got += tensors
        assert last is (len(got) == 3)
    assert got == sent
    before = old.copy()
    for tensor in got:
        assert apply_tensor(read, tensor, old).tobytes() == new.tobytes()
    assert old.tobytes() == before.tobytes()


@given(versions(), st.sampled_from(OPERATIONS), st.integers(1, 90), st.integers(1, 300))
@settings(max_examples=150, deadline=None)
def test_a_delta_does_not_depend_on_the_pieces_of_a_tensor(
    version: tuple[str, np.ndarray, np.ndarray], operation: str, chunk: int, piece: int
) -> None:
    dtype, old, new = version
    # A part that has changed as a whole, of a tensor that has not.
    new[100 * ITEM_BYTES[dtype] : 200 * ITEM_BYTES[dtype]] ^= 1
    whole = encode(old, new, ITEM_BYTES[dtype], operation)
    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(2) as threads:
        patched.setattr(encoding, "CHUNK", chunk)
        patched.setattr(encoding, "PIECE", piece)
        cut = encode(old, new, ITEM_BYTES[dtype], operation, threads.map)
    assert cut == whole
    assert apply(old, cut, ITEM_BYTES[dtype], operation).tobytes() == new.tobytes()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_smaller_form_is_chosen(operation: str) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 100_000, np.uint16)
    few, all_ = old.copy(), old ^ random.integers(1, 2**16, 100_000, np.uint16).astype(np.uint16)
    few[random.choice(100_000, 500, replace=False)] ^= 1
    forms = [encode(old.view(np.uint8), new.view(np.uint8), 2, operation) for new in (old, few, all_)]
    assert [form.form for form in forms] == ["same", "sparse", "dense"]
    assert [form.changed for form in forms] == [0, 500, 100_000]
    assert len(forms[1].payload) < 2_500 and len(forms[2].payload) < 1.01 * old.nbytes


def test_far_apart_changes_keep_their_places() -> None:
    old = np.zeros(200_000, np.uint8)
    new = old.copy()
    new[[0, 1, 255, 257, 70_000, 199_999]] = 7
    change = encode(old, new, 1, "xor")
    assert (change.form, change.gap_bytes) == ("sparse", 4)
    assert apply(old, change, 1, "xor").tobytes() == new.tobytes()


def test_other_weights_than_the_base_are_noticed() -> None:
    old = np.arange(64, dtype=np.uint8)
    for changed in (old + 1, old):
        delta = encode_tensor(about(), "w", "bfloat16", (32,), old, changed.astype(np.uint8))
        other = old.copy()
        other[5] ^= 4
        with pytest.raises(DataLoss, match="version 4 as a delta of 3: tensor w has checksum .* not the trainer's"):
            apply_tensor(about(), delta, other)
    with pytest.raises(DataLoss, match="tensor w has 64 bytes, 62 are here"):
        apply_tensor(about(), delta, old[:62])


def test_damaged_buckets_are_refused() -> None:
    old = np.arange(64, dtype=np.uint8)
    delta = encode_tensor(about(), "w", "uint8", (64,), old, old[::-1].copy())
    ((bucket, _),) = write_buckets(about(), [delta], 10**6)
    for end in (0, 5, 40, len(bucket) - 1):
        with pytest.raises(DataLoss, match="cannot be read"):
            read_bucket(bucket[:end])
    for place in (len(bucket) - 1, len(bucket) - len(delta.change.payload)):
        damaged = bytearray(bucket)
        damaged[place] ^= 255
        with pytest.raises(DataLoss, match="tensor w"):
            apply_tensor(about(), read_bucket(bytes(damaged))[1][0], old)


@pytest.mark.parametrize("text", ['"dtype": "load"', '"dtype": []', '"shape": [Infinity]', '"length": 1e999'])
def test_buckets_with_values_that_cannot_be_are_refused(text: str) -> None:
    old = np.arange(64, dtype=np.uint8)
    ((bucket, _),) = write_buckets(about(), [encode_tensor(about(), "w", "uint8", (64,), old, old)], 10**6)
    found = {"dtype": '"dtype": "uint8"', "shape": '"shape": [64]', "length": '"length": 0'}[text.split('"')[1]]
    header = bucket[8:].replace(found.encode(), text.encode())
    assert header != bucket[8:]
    with pytest.raises(DataLoss, match="cannot be read"):
        read_bucket(len(header).to_bytes(8, "little") + header)


def test_an_unknown_checksum_is_named() -> None:
    with pytest.raises(NotAvailable, match="--update-weight-delta-checksum must be one of xxh3-128, blake3, adler32"):
        find_checksum("crc32")


def test_the_index_of_a_directory(tmp_path: Path) -> None:
    assert read_index(tmp_path) is None
    write_index(tmp_path, about(), ["a.bin", "b.bin"])
    assert read_index(tmp_path) == (about(), [tmp_path / "a.bin", tmp_path / "b.bin"])
    index = tmp_path / "weight_delta.json"
    content = json.loads(index.read_text())
    assert content["base_version"] == 3 and content["compression_format"] == "zstd"
    for broken in ("{", json.dumps({**content, "files": ["../a"]}), json.dumps({"files": []})):
        index.write_text(broken)
        with pytest.raises(InvalidFile, match=r"weight_delta\.json"):
            read_index(tmp_path)
