"""Base classes of blob stores: one process keeps blobs; readers ask it through Ray where they are, and fetch them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slime.types.blobs import BlobReader, BlobWriter
from slime.types.errors import DeadlineExceeded, SlimeError, Unavailable, counted


class KeptWriter(BlobWriter):
    """Puts blobs where other processes can read them. Pickling sends only its settings, not the blobs."""

    @abstractmethod
    def offer(self, wanted: Sequence[bytes]) -> Any:
        """Returns the location of the blobs with these digests, for `KeeperReader.fetch`. Raises NotFound."""


@dataclass
class KeeperReader(BlobReader):
    """Reads blobs of another process.

    keeper: handle of the Ray actor whose writer holds them. timeout_seconds: deadline of one `read`.
    """

    keeper: Any
    timeout_seconds: float
    where: ClassVar[str]

    @abstractmethod
    def fetch(self, offer: Any, wanted: Sequence[bytes], deadline: float) -> list[Any]:
        """Fetches blobs until `deadline` (time.monotonic). Raises Unavailable, DeadlineExceeded and Ray's errors."""

    def read(self, wanted: Sequence[bytes]) -> list[Any]:
        import ray

        deadline = time.monotonic() + self.timeout_seconds
        try:
            offer = ray.get(self.keeper.find_blobs.remote(list(wanted)), timeout=self.timeout_seconds)
            return self.fetch(offer, wanted, deadline)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, SlimeError):
                raise error.cause from None
            raise
        except ray.exceptions.GetTimeoutError:
            raise self.late(wanted) from None
        except ray.exceptions.RayError as error:
            # Ray loses an object with the process that put it, and with the node that stored it.
            raise self.gone(wanted, first_line(error)) from None

    def late(self, wanted: Sequence[bytes]) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{counted(len(wanted), 'blob')} of the buffer did not arrive through {self.where} within "
            f"{self.timeout_seconds:g} s",
            field="reference",
        )

    def gone(self, wanted: Sequence[bytes], why: str) -> Unavailable:
        blobs = counted(len(wanted), "blob of the buffer is", "blobs of the buffer are")
        return Unavailable(f"{blobs} gone from {self.where}: {why}", field="reference")


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
