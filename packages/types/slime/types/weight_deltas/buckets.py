"""Buckets of deltas: one message to an engine, or one file of a version on disk.

    uint64, little-endian: length of the header
    header: JSON, `VersionDelta` and a row for each tensor, with the checksum of its bytes after the change
    payloads, in the order of the rows

Each bucket can be applied by itself. The buckets of a version hold every tensor once, unchanged ones included, so that
an engine whose weights differ from the base version notices.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime.types.errors import DataLoss, InvalidFile, NotAvailable
from slime.types.weight_deltas.checksums import find_checksum
from slime.types.weight_deltas.encoding import Bytes, Change, Run, apply, decode, encode

COMPRESSION = "zstd"
INDEX = "weight_delta.json"
# Bytes of an element by the name of its type in torch.
ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_ROW_BYTES = 300
# Most bytes of the tensors in a bucket, unless one is larger: an engine applies one while the next one is encoded.
TENSOR_BYTES = 32 << 20


@dataclass(frozen=True)
class VersionDelta:
    """One version as changes of another. lineage: names the trainer process, and the sequence of versions in it, that
    both belong to."""

    version: int
    base_version: int
    lineage: str
    delta_encoding: str
    checksum_format: str
    compression_format: str = COMPRESSION


@dataclass(frozen=True)
class TensorDelta:
    """The change of one tensor, by its name. checksum: of the tensor's bytes after the change."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    change: Change


def encode_tensor(
    about: VersionDelta, name: str, dtype: str, shape: Iterable[int], old: Bytes, new: Bytes, run: Run = map
) -> TensorDelta:
    """Encodes the change of a tensor's bytes from `old` to `new`, which have the same length. run: see `encode`."""
    change = encode(old, new, ITEM_BYTES[dtype], about.delta_encoding, run)
    return TensorDelta(name, dtype, tuple(shape), find_checksum(about.checksum_format)(new), change)


def apply_tensor(about: VersionDelta, delta: TensorDelta, old: Bytes) -> Bytes:
    """Returns the tensor's bytes in the new version, and leaves `old` as it is.

    Raises DataLoss naming the tensor if the bytes are not the trainer's.
    """
    size = _bytes_of(delta)
    if size != len(old):
        message = f"{_where(about, delta)} has {size} bytes, {len(old)} are here"
        raise DataLoss(message, field=delta.name, value=len(old))
    with _named(about, delta):
        new = apply(old, delta.change, ITEM_BYTES[delta.dtype], about.delta_encoding)
    check_tensor(about, delta, new)
    return new


def decode_tensor(about: VersionDelta, delta: TensorDelta) -> tuple[Any, Any]:
    """Returns what `encoding.decode` does of a tensor that has changed. Raises DataLoss naming the tensor."""
    item_bytes = ITEM_BYTES[delta.dtype]
    with _named(about, delta):
        return decode(delta.change, _bytes_of(delta) // item_bytes, item_bytes, about.delta_encoding)


def check_tensor(about: VersionDelta, delta: TensorDelta, new: Bytes) -> None:
    """Raises DataLoss naming the tensor if its bytes after the change are not the trainer's."""
    found = find_checksum(about.checksum_format)(new)
    if found != delta.checksum:
        raise DataLoss(
            f"{_where(about, delta)} has checksum {found} after the change, expected {delta.checksum}: the weights "
            f"here are not the trainer's version {about.base_version}",
            field=delta.name, value=found, expected=delta.checksum,
        )  # fmt: skip


@contextmanager
def _named(about: VersionDelta, delta: TensorDelta) -> Iterator[None]:
    try:
        yield
    except DataLoss as error:
        raise DataLoss(f"{_where(about, delta)}: {error.message}", field=delta.name) from error


def _where(about: VersionDelta, delta: TensorDelta) -> str:
    return f"weight version {about.version} as a delta of {about.base_version}: tensor {delta.name}"


def write_buckets(
    about: VersionDelta, tensors: Iterable[TensorDelta], max_bytes: int, tensor_bytes: int = TENSOR_BYTES
) -> Iterator[tuple[bytes, bool]]:
    """Yields (bucket, whether it is the last), each of at most about `max_bytes`, with at most `tensor_bytes` of
    tensors; a larger tensor is alone in its bucket."""
    bucket: list[TensorDelta] = []
    held = changed = 0
    for tensor in tensors:
        delta_bytes = len(tensor.change.payload) + len(tensor.name) + _ROW_BYTES
        if bucket and (changed + delta_bytes > max_bytes or held + _bytes_of(tensor) > tensor_bytes):
            yield _write(about, bucket), False
            bucket, changed, held = [], 0, 0
        bucket.append(tensor)
        changed, held = changed + delta_bytes, held + _bytes_of(tensor)
    yield _write(about, bucket), True


def _bytes_of(tensor: TensorDelta) -> int:
    return ITEM_BYTES.get(tensor.dtype, 0) * int(np.prod(tensor.shape, dtype=np.int64))


def _write(about: VersionDelta, tensors: list[TensorDelta]) -> bytes:
    rows = [
        {
            "name": t.name, "dtype": t.dtype, "shape": t.shape, "checksum": t.checksum, "form": t.change.form,
            "changed": t.change.changed, "gap_bytes": t.change.gap_bytes, "length": len(t.change.payload),
        }
        for t in tensors
    ]  # fmt: skip
    header = json.dumps({**dataclasses.asdict(about), "tensors": rows}).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(t.change.payload for t in tensors)])


def read_bucket(data: bytes) -> tuple[VersionDelta, list[TensorDelta]]:
    """Decodes one bucket. Raises DataLoss for bytes that are not a whole bucket."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        if start > len(data):
            raise ValueError(f"the header has {length} bytes of {len(data)}")
        header = json.loads(data[_LENGTH.size : start])
        tensors = []
        for row in header.pop("tensors"):
            end = start + int(row["length"])
            if not start <= end <= len(data):
                raise ValueError(f"{row['name']} ends at byte {end} of {len(data)}")
            change = Change(str(row["form"]), int(row["changed"]), int(row["gap_bytes"]), data[start:end])
            shape = tuple(int(size) for size in row["shape"])
            if row["dtype"] not in ITEM_BYTES:
                raise ValueError(f"{row['name']} has dtype {row['dtype']!r}, expected one of {', '.join(ITEM_BYTES)}")
            tensors.append(TensorDelta(str(row["name"]), str(row["dtype"]), shape, str(row["checksum"]), change))
            start = end
        about = _about(header)
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise DataLoss(f"a bucket of a weight delta cannot be read: {error}", field="body") from error
    return about, tensors


def _about(header: dict[str, Any]) -> VersionDelta:
    about = VersionDelta(**header)
    if about.compression_format != COMPRESSION:
        raise NotAvailable.unavailable(f"compression_format {about.compression_format}", f"deltas are {COMPRESSION}")
    return about


def write_index(directory: Path, about: VersionDelta, files: list[str]) -> None:
    content = {**dataclasses.asdict(about), "files": files}
    (directory / INDEX).write_text(json.dumps(content, indent=1) + "\n")


def read_index(directory: Path) -> tuple[VersionDelta, list[Path]] | None:
    """Returns the files of a delta in `directory`; None where it holds none. Raises InvalidFile."""
    file = directory / INDEX
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        names = [str(name) for name in content.pop("files")]
        if any(Path(name).name != name for name in names):
            raise ValueError(f"files {names} are not all in its directory")
        return _about(content), [directory / name for name in names]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidFile(f"{file}: {error}", field="model_path", value=str(file)) from error
