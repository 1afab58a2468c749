"""Encodes the changes between two versions of a tensor's bytes, and applies them.

An element counts as changed if its bits differ, so -0.0, infinities and the payloads of NaNs arrive as they are. There
are three forms:

    same     nothing
    sparse   the distances between changed elements, then their values
    dense    the values of all elements, where most have changed

A value is the new bits (overwrite) or their exclusive or with the old ones (xor). Numbers are stored plane by plane:
the first bytes of all values, then the second bytes. High bytes are mostly alike, so zstd compresses their plane well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slime.types.errors import DataLoss, NotAvailable
from slime.types.weight_deltas.checksums import EXTRA

OPERATIONS = ("xor", "overwrite")
# The next levels are slower and compress differences of weights no better.
LEVEL = 1
# The share of changed elements up to which the sparse form was smaller in trials.
SPARSE_UP_TO = 0.5
# Elements that are compared at once: what is found is still in the processor's cache when it is read.
CHUNK = 1 << 19
# Elements that one thread compares.
PIECE = 1 << 23
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
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


def encode(old: Bytes, new: Bytes, item_bytes: int, operation: str, run: Run = map) -> Change:
    """Encodes the bytes of a tensor whose elements have `item_bytes`: 1, 2, 4 or 8. run: `map`, or that of a pool of
    threads, for pieces of a large tensor."""
    before, after = _elements(old, item_bytes), _elements(new, item_bytes)

    def find(start: int, most: float) -> _Found:
        return _find(before[start : start + PIECE], after[start : start + PIECE], operation, most)

    starts = range(0, len(after), PIECE)
    found = [*run(lambda start: find(start, SPARSE_UP_TO), starts)]
    changed = sum(piece.changed for piece in found)
    if not changed:
        return SAME
    if changed > SPARSE_UP_TO * len(after):
        values = before ^ after if operation == "xor" else after
        return Change("dense", changed, 0, _compress(_planes(values)))
    # Parts that have changed as a whole, of a tensor that has not.
    found = [piece if piece.whole else find(start, 1.0) for piece, start in zip(found, starts, strict=True)]
    places = [place + start for piece, start in zip(found, starts, strict=True) for place in piece.places]
    return _sparse(np.concatenate(places), np.concatenate([v for piece in found for v in piece.values]))


class _Found(NamedTuple):
    """The elements of a piece that differ. places: int64, from the piece's first element on; values: what changes them,
    unsigned integers. whole: whether places and values are all of them."""

    changed: int
    places: list[Any]
    values: list[Any]
    whole: bool


def _find(before: Any, after: Any, operation: str, most: float) -> _Found:
    """Compares chunk by chunk. most: share of changed elements above which a chunk's places are not looked for."""
    changed, whole, places, values = 0, True, [], []
    for start in range(0, len(after), CHUNK):
        old, new = before[start : start + CHUNK], after[start : start + CHUNK]
        differs = old != new
        count = int(np.count_nonzero(differs))
        changed += count
        if count > most * len(new):
            whole = False
            continue
        here = np.flatnonzero(differs)
        places.append(here + start)
        values.append(old[here] ^ new[here] if operation == "xor" else new[here])
    return _Found(changed, places, values, whole)


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


def _sparse(positions: Any, values: Any) -> Change:
    gaps = np.diff(positions, prepend=-1) - 1
    gap_bytes = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << (8 * size - (size == 8)))
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
