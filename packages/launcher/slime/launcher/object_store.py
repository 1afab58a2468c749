"""Ray's object store as a blob store: shared memory on a node, one transfer to each further node.

The buffer's process keeps what it put; a reader asks that process, of which its configuration has the handle, and no
message names a place. What Ray cannot hold in memory it writes to its directory of spilled objects.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.types.blobs import BlobReader, BlobWriter
from slime.types.errors import DeadlineExceeded, OutOfSpace, SlimeError, Unavailable

NAME = "ray"


class ObjectStoreWriter(BlobWriter):
    """What is put together is one object of Ray's, a list of arrays. Only the settings travel to another process."""

    name = NAME

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStoreWriter, (self.inline_bytes,)

    def hold(self, blobs: Sequence[bytes]) -> list[Any]:
        """(object, position there) of each."""
        import ray

        try:
            reference = ray.put([np.frombuffer(blob, np.uint8) for blob in blobs])
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            size = sum(map(len, blobs))
            raise OutOfSpace(
                f"Ray's object store has no room for {size} bytes of samples: {_first_line(error)}",
                field="--rollout-data-transport",
                value="object-store",
                expected="a larger store (ray start --object-store-memory), or grpc",
            ) from error
        return [(reference, position) for position in range(len(blobs))]

    def objects(self, wanted: Sequence[bytes]) -> tuple[list[Any], list[tuple[int, int]]]:
        """(objects, of each blob the number of its object and its position there). Raises NotFound."""
        numbers: dict[Any, int] = {}
        places = [(numbers.setdefault(reference, len(numbers)), position) for reference, position in self.find(wanted)]
        return list(numbers), places


@dataclass
class ObjectStoreReader(BlobReader):
    """keeper: handle of the actor whose writer put the blobs. timeout_seconds: of one `read`."""

    keeper: Any
    timeout_seconds: float
    name = NAME

    def read(self, wanted: Sequence[bytes]) -> list[np.ndarray]:
        import ray

        deadline = time.monotonic() + self.timeout_seconds
        try:
            objects, places = ray.get(self.keeper.find_blobs.remote(list(wanted)), timeout=self.timeout_seconds)
            arrays = ray.get(objects, timeout=max(deadline - time.monotonic(), 0.0))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            raise DeadlineExceeded(
                f"{len(wanted)} blobs of the buffer did not come through Ray's object store within "
                f"{self.timeout_seconds:g} s",
                field="reference",
            ) from None
        except ray.exceptions.RayError as error:
            # The buffer died, and what it had put went with it, or a node did that held it.
            raise Unavailable(
                f"{len(wanted)} blobs of the buffer are gone from Ray's object store: {_first_line(error)}",
                field="reference",
            ) from None
        return [arrays[number][position] for number, position in places]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
