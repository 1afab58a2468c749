"""Encodes the changes between two versions of a tensor's bytes, and applies them.

An element counts as changed if its bits differ, so -0.0, infinities and the payloads of NaNs arrive as they are. The
smallest of three forms is used:

    same     nothing
    sparse   the distances between changed elements, then their values
    dense    the values of all elements

A value is the new bits (overwrite) or their exclusive or with the old ones (xor). Numbers are stored plane by plane:
the first bytes of all values, then the second bytes. High bytes are mostly alike, so zstd compresses their plane well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.types.errors import DataLoss, NotAvailable
from slime.types.weight_deltas.checksums import EXTRA

OPERATIONS = ("xor", "overwrite")
# The next levels are slower and compress differences of weights no better.
LEVEL = 1
# Between these shares of changed elements both forms are tried.
SPARSE_UP_TO = 0.5
DENSE_FROM = 0.02
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class Change:
    """The change of one tensor.

    changed: number of elements; gap_bytes: of a distance in the sparse form. payload: compressed."""

    form: str
    changed: int
    gap_bytes: int
    payload: bytes


SAME = Change("same", 0, 0, b"")


def encode(old: Bytes, new: Bytes, item_bytes: int, operation: str) -> Change:
    """Encodes the bytes of a tensor whose elements have `item_bytes`: 1, 2, 4 or 8."""
    before, after = _elements(old, item_bytes), _elements(new, item_bytes)
    differs = before != after
    changed = int(np.count_nonzero(differs))
    if not changed:
        return SAME
    share = changed / len(after)
    forms = []
    if share <= SPARSE_UP_TO:
        forms.append(_sparse(before, after, np.flatnonzero(differs), operation))
    if share >= DENSE_FROM:
        values = before ^ after if operation == "xor" else after
        forms.append(Change("dense", changed, 0, _compress(_planes(values))))
    return min(forms, key=lambda form: len(form.payload))


def apply(old: Bytes, change: Change, item_bytes: int, operation: str) -> Bytes:
    """Returns the new bytes, and leaves `old` as it is. Raises DataLoss for a payload that does not fit."""
    if change.form == "same":
        return old
    before = _elements(old, item_bytes)
    positions, values = decode(change, len(before), item_bytes, operation)
    if positions is None:
        return (before ^ values if operation == "xor" else values).view(np.uint8)
    after = before.copy()
    after[positions] = before[positions] ^ values if operation == "xor" else values
    return after.view(np.uint8)


def decode(change: Change, size: int, item_bytes: int, operation: str) -> tuple[Any, Any]:
    """Returns the places of the elements that change, int64 [n] in ascending order, or None for all of the tensor's
    `size` elements; and what `operation` does to them, unsigned integers [n]. Raises DataLoss as `apply` does.

    change: of another form than `same`.
    """
    if operation not in OPERATIONS:
        raise DataLoss(f"a delta is {operation!r}, expected {' or '.join(OPERATIONS)}")
    if change.form == "dense":
        return None, _from_planes(_decompress(change.payload, size * item_bytes), item_bytes)
    if change.form != "sparse" or change.gap_bytes not in (1, 2, 4, 8) or not 0 < change.changed <= size:
        raise DataLoss(
            f"a delta has form {change.form!r}, changed {change.changed}, gap_bytes {change.gap_bytes}, "
            f"for a tensor of size {size}"
        )
    split = change.changed * change.gap_bytes
    content = _decompress(change.payload, split + change.changed * item_bytes)
    gaps = _from_planes(content[:split], change.gap_bytes).astype(np.int64)
    positions = np.cumsum(gaps + 1) - 1
    # Distances that wrap around would not be in order.
    if gaps.min() < 0 or gaps.max() >= size or positions[-1] >= size:
        raise DataLoss(f"a delta changes elements outside of the tensor, whose size is {size}")
    return positions, _from_planes(content[split:], item_bytes)


def _sparse(before: Any, after: Any, positions: Any, operation: str) -> Change:
    gaps = np.diff(positions, prepend=-1) - 1
    gap_bytes = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << (8 * size - (size == 8)))
    values = before[positions] ^ after[positions] if operation == "xor" else after[positions]
    content = np.concatenate([_planes(gaps.astype(f"<u{gap_bytes}")), _planes(values)])
    return Change("sparse", len(positions), gap_bytes, _compress(content))


def _elements(data: Bytes, item_bytes: int) -> Any:
    return data.view(f"<u{item_bytes}")


def _planes(values: Any) -> Bytes:
    """Returns the first bytes of all values, then their second bytes, and so on."""
    size = values.dtype.itemsize
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, size).T).reshape(-1)


def _from_planes(data: Bytes, size: int) -> Any:
    return np.ascontiguousarray(data.reshape(size, -1).T).reshape(-1).view(f"<u{size}")


def _compress(data: Bytes) -> bytes:
    return bytes(zstandard_module().ZstdCompressor(level=LEVEL).compress(data))


def _decompress(payload: bytes, size: int) -> Bytes:
    zstandard = zstandard_module()
    try:
        # The decompressor makes room for what the frame announces.
        announced = zstandard.get_frame_parameters(payload).content_size
        if announced != size:
            raise DataLoss(f"a delta announces {announced} bytes, expected {size}")
        content = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise DataLoss(f"a delta cannot be decompressed: {error}") from error
    return np.frombuffer(content, np.uint8)


def zstandard_module() -> Any:
    """Raises NotAvailable where the package is not installed."""
    try:
        import zstandard
    except ImportError:
        raise NotAvailable.not_installed("--update-weight-mode delta", "zstandard", EXTRA) from None
    return zstandard
