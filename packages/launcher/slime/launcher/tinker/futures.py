"""Results of accepted requests, by request id, which clients fetch later.

A client waits a limited time for a result and is then told to ask again. A result is kept for a while after it was
fetched, because the answer may have been lost on its way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from slime.types.errors import Busy, SlimeError

log = logging.getLogger(__name__)

# gRPC statuses of errors that the client caused.
_OF_USERS = ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED")
FETCHED_SECONDS = 120.0
# For results that nobody fetches.
KEPT_SECONDS = 3600.0
MOST = 16384


@dataclass
class _Entry:
    """A request and its result. until: when to forget the result, in monotonic seconds; infinite until it is there."""

    task: asyncio.Task[Any]
    until: float = math.inf

    def keep(self, seconds: float) -> None:
        self.until = min(self.until, time.monotonic() + seconds)


class Futures:
    """The results of requests by id. Used on one event loop. A result is a JSON object or encoded protobuf."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def add(self, request_id: str, begin: Callable[[], Awaitable[dict[str, Any] | bytes]]) -> None:
        """Begins the work on a request. Raises Busy, without calling `begin`, and what `begin` raises."""
        self._forget()
        if len(self._entries) >= MOST:
            raise Busy(f"{MOST} requests are waiting or have results that nobody fetched", field="request_id")
        entry = _Entry(asyncio.ensure_future(_outcome(begin())))
        entry.task.add_done_callback(lambda _: entry.keep(KEPT_SECONDS))
        self._entries[request_id] = entry

    async def get(self, request_id: str, seconds: float) -> dict[str, Any] | bytes | None:
        """Returns the result, or {"error", "category"} if the work failed; None if it is not there in time.

        Raises KeyError for a request that is unknown or forgotten.
        """
        entry = self._entries[request_id]
        done, _ = await asyncio.wait({entry.task}, timeout=seconds)
        if not done:
            return None
        entry.keep(FETCHED_SECONDS)
        if entry.task.cancelled():
            return {"error": "the request was cancelled", "category": "user"}
        return entry.task.result()

    def cancel(self, request_id: str) -> None:
        """Cancels the work on a request, if it is known."""
        if request_id in self._entries:
            self._entries[request_id].task.cancel()

    def _forget(self) -> None:
        now = time.monotonic()
        gone = [name for name, entry in self._entries.items() if entry.until < now]
        for name in gone:
            del self._entries[name]

    async def close(self) -> None:
        tasks = [entry.task for entry in self._entries.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _outcome(work: Awaitable[dict[str, Any] | bytes]) -> dict[str, Any] | bytes:
    try:
        return await work
    except SlimeError as error:
        log.warning("a request failed: %s", error)
        return failure(error)
    except Exception as error:
        log.exception("a request failed")
        return {"error": f"{type(error).__name__}: {error}", "category": "server"}


def failure(error: SlimeError) -> dict[str, Any]:
    """Returns the form of an error that the SDK calls RequestFailedResponse."""
    of_user = error.status in _OF_USERS or error.status == "UNIMPLEMENTED"
    return {"error": str(error), "category": "user" if of_user else "server"}
