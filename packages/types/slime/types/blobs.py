"""Blobs: large tensors that travel beside their message, through a store that both sides are configured with.

    writer: detach(messages, store, owner)    inline bytes -> references, the bytes in the store
    reader: resolver(messages, store)         references -> bytes, checked against length and SHA-256

A blob lives until all its owners (steps, for example) are released.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from slime.types.errors import InvalidField, NotFound
from slime.types.wire.tensor import Resolver
from slime.v1 import sample_pb2, tensor_pb2

# Below this size a store gains nothing, even for tensors that two ranks need: digests, lookups and copies cost more
# than sending the tensors twice in messages (benchmarks/launcher/data_transport.py --kib 64).
INLINE_BYTES = 64 << 10
DIGEST_THREADS = 4


@dataclass
class _Kept:
    handle: Any
    length: int
    owners: set[int] = field(default_factory=set)


class BlobWriter(ABC):
    """Keeps blobs, each once, by its SHA-256 digest. Thread-safe.

    name: identifies the store in references. inline_bytes: tensors below this size stay in their message.
    """

    name: str

    def __init__(self, inline_bytes: int = INLINE_BYTES) -> None:
        self.inline_bytes = inline_bytes
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Kept] = {}

    @abstractmethod
    def hold(self, blobs: Sequence[bytes]) -> list[Any]:
        """Stores `blobs` and returns a handle for each; dropping the handle frees the blob. Raises OutOfSpace."""

    def put(self, blobs: Sequence[bytes], owner: int) -> list[tensor_pb2.BlobReference]:
        """Keeps `blobs` for `owner` and returns references to them. Raises OutOfSpace."""
        named = list(zip(digests(blobs), blobs, strict=True))
        with self._lock:
            # Blobs that are kept already get their owner now, so that none is released before the second pass.
            new = {digest: blob for digest, blob in named if not self._add_owner(digest, owner)}
        handles = self.hold(list(new.values())) if new else []
        with self._lock:
            for (digest, blob), handle in zip(new.items(), handles, strict=True):
                self._kept.setdefault(digest, _Kept(handle, len(blob))).owners.add(owner)
        return [tensor_pb2.BlobReference(store=self.name, sha256=digest, length=len(blob)) for digest, blob in named]

    def _add_owner(self, digest: bytes, owner: int) -> bool:
        """Adds an owner to a blob; returns whether the blob is kept."""
        kept = self._kept.get(digest)
        if kept is not None:
            kept.owners.add(owner)
        return kept is not None

    def release(self, owner: int) -> None:
        """Ends the ownership of `owner`, and forgets the blobs that have no owner left."""
        with self._lock:
            for kept in self._kept.values():
                kept.owners.discard(owner)
            self._kept = {digest: kept for digest, kept in self._kept.items() if kept.owners}

    def find(self, wanted: Sequence[bytes]) -> list[Any]:
        """Returns the handles of the blobs with these digests. Raises NotFound."""
        with self._lock:
            for digest in wanted:
                if digest not in self._kept:
                    raise NotFound(
                        f"no blob {digest.hex()} in the store {self.name}: it was released",
                        field="reference.sha256",
                        value=digest.hex(),
                        expected="a blob of a step that is not acknowledged",
                    )
            return [self._kept[digest].handle for digest in wanted]

    def kept_bytes(self) -> int:
        """Returns the total size of the blobs that are kept, in bytes."""
        with self._lock:
            return sum(kept.length for kept in self._kept.values())


class BlobReader(ABC):
    """Reads blobs. Thread-safe. name: identifies the store in references."""

    name: str

    @abstractmethod
    def read(self, wanted: Sequence[bytes]) -> list[Any]:
        """Returns the bytes (or a flat, read-only array of them) of the blobs with these SHA-256 digests.

        Raises NotFound for a blob that is not kept, Unavailable if the writer is gone, DeadlineExceeded.
        """


def detach(messages: Iterable[Message], store: BlobWriter, owner: int) -> int:
    """Moves the tensors of at least `store.inline_bytes` bytes from `messages` into `store`, all in one call.

    Returns the number of bytes moved.
    """
    min_bytes = max(store.inline_bytes, 1)
    # Reading `inline` copies it, so tensors that are too small as a whole are skipped first.
    large = [(tensor, tensor.inline) for tensor in tensors(messages) if tensor.ByteSize() > min_bytes]
    large = [(tensor, data) for tensor, data in large if len(data) >= min_bytes]
    if large:
        references = store.put([data for _, data in large], owner)
        for (tensor, _), reference in zip(large, references, strict=True):
            tensor.reference.CopyFrom(reference)
    return sum(len(data) for _, data in large)


def resolver(messages: Iterable[Message], store: BlobReader) -> Resolver:
    """Reads the blobs that `messages` refer to, all in one call; returns a function from reference to bytes.

    Raises InvalidField for a reference into another store and for bytes whose digest differs, and the errors of `read`.
    """
    wanted: dict[bytes, None] = {}
    for tensor in tensors(messages):
        if tensor.WhichOneof("data") == "reference":
            if tensor.reference.store != store.name:
                raise InvalidField("reference.store", tensor.reference.store, f"{store.name}, which is configured here")
            wanted[tensor.reference.sha256] = None
    found = dict(zip(wanted, store.read(list(wanted)), strict=True)) if wanted else {}
    for digest, actual in zip(found, digests(list(found.values())), strict=True):
        if actual != digest:
            expected = f"{digest.hex()}, the digest of the bytes that were stored"
            raise InvalidField("reference.sha256", actual.hex(), expected)
    return lambda reference: found[reference.sha256]


def digests(blobs: Sequence[Any]) -> list[bytes]:
    """Returns the SHA-256 digests of `blobs`, computed in threads: a core hashes about 1 GB per second."""
    if len(blobs) < 2:
        return [hashlib.sha256(blob).digest() for blob in blobs]
    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        return list(pool.map(lambda blob: hashlib.sha256(blob).digest(), blobs))


def tensors(messages: Iterable[Message]) -> Iterator[tensor_pb2.Tensor]:
    """Yields every tensor that is set in `messages`: samples, or parts of samples."""
    for message in messages:
        if isinstance(message, tensor_pb2.Tensor):
            yield message
        elif isinstance(message, tensor_pb2.Value):
            yield from _value_tensors(message)
        else:
            for name in _PARTS:
                if message.HasField(name):
                    yield from tensors((getattr(message, name),))


def _value_tensors(value: tensor_pb2.Value) -> Iterator[tensor_pb2.Tensor]:
    kind = value.WhichOneof("kind")
    if kind == "tensor_value":
        yield value.tensor_value
    elif kind == "list_value":
        yield from tensors(value.list_value.values)
    elif kind == "map_value":
        yield from tensors(value.map_value.values.values())


_PARTS = tuple(
    field.name
    for field in sample_pb2.Sample.DESCRIPTOR.fields
    if field.message_type in (tensor_pb2.Tensor.DESCRIPTOR, tensor_pb2.Value.DESCRIPTOR)
)
