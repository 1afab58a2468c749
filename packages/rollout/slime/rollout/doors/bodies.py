"""Reads the bodies of requests within limits of size and time."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from aiohttp import web

from slime.rollout.doors.access import Refused
from slime.types.errors import InvalidField

MAX_BYTES = 64 * 2**20
MAX_BYTES_TOGETHER = 2**30
BODY_SECONDS = 60.0
# A body that arrives at least this fast is not cut off, however large it is.
LEAST_BYTES_PER_SECOND = 64 * 2**10
# Waiting is counted in ticks, so that a time in which this process gets no CPU counts as one tick at most.
TICK_SECONDS = 1.0


class Bodies:
    """Reads bodies within limits.

    max_bytes: bytes of one body. together: bytes of all bodies that are being read. seconds: the longest wait for a
    body, plus one second for each LEAST_BYTES_PER_SECOND of it that have arrived.
    """

    def __init__(
        self, *, max_bytes: int = MAX_BYTES, seconds: float = BODY_SECONDS, together: int = MAX_BYTES_TOGETHER
    ) -> None:
        self.max_bytes = max_bytes
        self.seconds = seconds
        self._left = together

    async def read(self, request: web.Request) -> bytes:
        """Returns the body. Raises Refused for one that is too large, is late, or exceeds the limit of all together."""
        if (request.content_length or 0) > self.max_bytes:
            raise self._too_large(request.content_length)
        parts: list[bytes] = []
        size, waited = 0, 0.0
        tick = min(TICK_SECONDS, self.seconds / 4)
        try:
            while not request.content.at_eof():
                began = time.monotonic()
                try:
                    async with asyncio.timeout(tick):
                        part = await request.content.readany()
                except TimeoutError:
                    part = b""
                waited += min(time.monotonic() - began, tick)
                size += len(part)
                self._left -= len(part)
                parts.append(part)
                if size > self.max_bytes:
                    raise self._too_large(f"more than {self.max_bytes}")
                if self._left < 0:
                    raise Refused(503, "body", size, "fewer requests at once", "too many bytes are being received")
                allowed = self.seconds + size / LEAST_BYTES_PER_SECOND
                if waited >= allowed:
                    raise Refused(
                        408, "body", f"{size} bytes in {waited:.3g} s", f"a whole body within {allowed:.3g} s"
                    )
        finally:
            self._left += size
        return b"".join(parts)

    async def json(self, request: web.Request) -> Any:
        """Returns the body as JSON, None for an empty one. Raises Refused as `read` does, or InvalidField."""
        raw = await self.read(request)
        return parse_json(raw) if raw else None

    def _too_large(self, size: object) -> Refused:
        return Refused(413, "body", f"{size} bytes", f"at most {self.max_bytes} bytes")


def parse_json(raw: bytes) -> Any:
    """Returns the parsed JSON. Raises InvalidField for anything else, or for too deep a nesting."""
    try:
        return json.loads(raw)
    except ValueError as error:
        raise InvalidField("body", raw[:100].decode(errors="replace"), f"JSON ({error})") from None
    except RecursionError:
        raise too_deep() from None


def too_deep() -> InvalidField:
    """Returns the error for a body that is nested too deeply, the only cause of a RecursionError in a handler."""
    return InvalidField("body", "deeply nested arrays or objects", "JSON that is nested less deeply")
