"""Ray's object store as a blob store: shared memory on a node, one transfer to each further node.

The buffer's process holds the references. A reader asks that process through the handle in its configuration, so that
no message names a location. Ray writes objects that do not fit into memory to its spill directory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.launcher.blob_stores.base import KeeperReader, KeptWriter, first_line
from slime.types.errors import OutOfSpace

NAME = "ray"


class ObjectStoreWriter(KeptWriter):
    """Keeps the blobs of one `put` as one Ray object, a list of arrays."""

    name = NAME

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStoreWriter, (self.inline_bytes,)

    def hold(self, blobs: Sequence[bytes]) -> list[Any]:
        """Returns (object reference, position in the object) of each blob. Raises OutOfSpace."""
        import ray

        try:
            reference = ray.put([np.frombuffer(blob, np.uint8) for blob in blobs])
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            size = sum(map(len, blobs))
            raise OutOfSpace(
                f"Ray's object store has no room for {size} bytes of samples: {first_line(error)}",
                field="--rollout-data-transport",
                value="object-store",
                expected="a larger store (ray start --object-store-memory), or grpc",
            ) from error
        return [(reference, position) for position in range(len(blobs))]

    def offer(self, wanted: Sequence[bytes]) -> tuple[list[Any], list[tuple[int, int]]]:
        """Returns (object references, [(index of the reference, position in the object) of each blob])."""
        numbers: dict[Any, int] = {}
        places = [(numbers.setdefault(reference, len(numbers)), position) for reference, position in self.find(wanted)]
        return list(numbers), places


class ObjectStoreReader(KeeperReader):
    """Reads blobs from Ray's object store."""

    name = NAME
    where = "Ray's object store"

    def fetch(self, offer: Any, wanted: Sequence[bytes], deadline: float) -> list[np.ndarray]:
        import ray

        objects, places = offer
        arrays = ray.get(objects, timeout=max(deadline - time.monotonic(), 0.0))
        return [arrays[number][position] for number, position in places]
