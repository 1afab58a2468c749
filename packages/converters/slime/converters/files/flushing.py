"""Sends files to disk while they are written, so that the wait for the disk at their end is short."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

# Less makes more waits for the disk than it saves; a kernel with much memory begins by itself only after gigabytes.
FLUSH_BYTES = 64 << 20


class Flusher:
    """Flushes files from a thread of its own after every `FLUSH_BYTES` that are written to them.

    The kernel tells a failed write of a descriptor's pages once, to whoever flushes first: `finish` raises what the
    thread was told.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._flushes: dict[int, Future[None]] = {}

    def wrote(self, descriptor: int, count: int) -> None:
        """Counts bytes that were written. Does not wait."""
        self._waiting[descriptor] = self._waiting.get(descriptor, 0) + count
        if self._waiting[descriptor] < FLUSH_BYTES:
            return
        known = self._flushes.get(descriptor)
        # One that failed stays, for `finish`.
        if known is None or (known.done() and known.exception() is None):
            self._waiting[descriptor] = 0
            self._pool = self._pool or ThreadPoolExecutor(1, "flush")
            self._flushes[descriptor] = self._pool.submit(os.fdatasync, descriptor)

    def finish(self, descriptor: int) -> None:
        """Returns once all that was written is on disk. Raises OSError."""
        self._waiting.pop(descriptor, None)
        if flush := self._flushes.pop(descriptor, None):
            flush.result()
        os.fsync(descriptor)

    def close(self) -> None:
        """Waits for flushes that were begun: their descriptors can be closed then."""
        if self._pool is not None:
            self._pool.shutdown()
