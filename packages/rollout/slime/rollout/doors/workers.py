"""Threads for slow work on requests, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from slime.types.errors import DeadlineExceeded

T = TypeVar("T")

THREADS = 4
SECONDS = 30.0


class Workers:
    """A few threads, so that slow requests do not hold up others. seconds: the longest time that a request waits."""

    def __init__(self, name: str, *, threads: int = THREADS, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, what: str, work: Callable[[], T]) -> T:
        """Returns the result of `work`, called in a thread. Raises DeadlineExceeded naming `what` after `seconds`."""
        try:
            async with asyncio.timeout(self.seconds):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError:
            raise DeadlineExceeded(f"{what} took longer than {self.seconds:g} s", field=what) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
