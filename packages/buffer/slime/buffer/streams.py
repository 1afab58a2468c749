"""Limits the number of open streams (each holds a thread), their duration, and the bytes that they hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from slime.types.errors import Busy, counted


class Cancellable(Protocol):
    def cancel(self) -> object: ...


class Streams:
    """The open streams of a server. Thread-safe. max_seconds: time after which a stream is cancelled. max_bytes: limit
    of all open streams together; None for no limit."""

    def __init__(self, max_streams: int, max_seconds: float, max_bytes: int | None = None) -> None:
        self.max_streams = max_streams
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        # In the order in which they were opened, with the time at which each ends.
        self._open: dict[int, tuple[float, Cancellable]] = {}
        self._watcher: threading.Thread | None = None
        self._bytes = 0

    @contextmanager
    def open(self, call: Cancellable) -> Iterator[Callable[[int], None]]:
        """Counts a stream as open during the block; yields a function to call with the size of each message in bytes.

        Raises Busy at a limit, as does that function.
        """
        with self._lock:
            if len(self._open) >= self.max_streams:
                raise Busy(
                    f"{counted(len(self._open), 'stream is', 'streams are')} open already: call again later",
                    field="stream",
                    value=len(self._open),
                    expected=f"fewer than {counted(self.max_streams, 'stream')} at a time",
                )
            self._open[id(call)] = (time.monotonic() + self.max_seconds, call)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="streams", daemon=True)
                self._watcher.start()
        held = 0

        def take(size: int) -> None:
            nonlocal held
            with self._lock:
                if self.max_bytes is not None and self._bytes + size > self.max_bytes:
                    raise Busy(
                        f"open streams hold {self._bytes} bytes already: call again later",
                        field="stream",
                        value=self._bytes + size,
                        expected=f"at most {self.max_bytes} bytes in all streams",
                    )
                self._bytes += size
                held += size

        try:
            yield take
        finally:
            with self._lock:
                self._open.pop(id(call), None)
                self._bytes -= held

    def _watch(self) -> None:
        """Runs while streams are open: one thread for all of them."""
        while True:
            with self._lock:
                if not self._open:
                    self._watcher = None
                    return
                now = time.monotonic()
                expired = [call for end, call in self._open.values() if end <= now]
            for call in expired:
                call.cancel()
            time.sleep(min(1.0, self.max_seconds))
