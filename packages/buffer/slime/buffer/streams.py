"""Limits of the streams that are open at a time: in number, for each holds a thread, and in bytes that they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.types.errors import Busy


class Streams:
    """Thread-safe. max_bytes: of all open streams together; None for no limit."""

    def __init__(self, max_streams: int, max_bytes: int | None = None) -> None:
        self.max_streams = max_streams
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._open = 0
        self._bytes = 0

    @contextmanager
    def open(self) -> Iterator[Callable[[int], None]]:
        """Around a stream; what it gives is called with the bytes of each message. Raises Busy, as that does."""
        with self._lock:
            if self._open >= self.max_streams:
                raise Busy(
                    f"{self._open} streams are open already: call again later",
                    field="stream",
                    value=self._open,
                    expected=f"fewer than {self.max_streams} streams at a time",
                )
            self._open += 1
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
                self._open -= 1
                self._bytes -= held
