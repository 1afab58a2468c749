"""Ray's object store as a blob store: shared memory on a node, one transfer to each further node.

The buffer's process keeps what it put; a reader asks that process, of which its configuration has the handle, and no
message names a place. What Ray cannot hold in memory it writes to its directory of spilled objects.
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
    """Keeps the blobs that are put together as one object of Ray's, a list of arrays."""

    name = NAME

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStoreWriter, (self.inline_bytes,)

    def hold(self, blobs: Sequence[bytes]) -> list[Any]:
        """Returns (object, position in it) of each blob."""
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
        """Returns (objects, [(number of the object, position in it) of each blob])."""
        numbers: dict[Any, int] = {}
        places = [(numbers.setdefault(reference, len(numbers)), position) for reference, position in self.find(wanted)]
        return list(numbers), places


class ObjectStoreReader(KeeperReader):
    name = NAME
    where = "Ray's object store"

    def fetch(self, offer: Any, wanted: Sequence[bytes], deadline: float) -> list[np.ndarray]:
        import ray

        objects, places = offer
        arrays = ray.get(objects, timeout=max(deadline - time.monotonic(), 0.0))
        return [arrays[number][position] for number, position in places]
