"""`slime.utils.http_utils`: `post` and `get` as code written for slime calls them."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from slime.types.errors import Unavailable

TIMEOUT_SECONDS = 14400.0


async def post(
    url: str,
    payload: dict[str, Any],
    max_retries: int = 60,
    action: str = "post",
    headers: dict[str, str] | None = None,
) -> Any:
    """The JSON of the answer (its text, where it is none). Tries again after a second where the server fails or does
    not answer; raises Unavailable after the last try."""
    last: Exception | None = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)) as session:
        for attempt in range(max_retries):
            try:
                async with session.request(action.upper(), url, json=payload or {}, headers=headers) as response:
                    response.raise_for_status()
                    if response.content_type == "application/json":
                        return await response.json()
                    return await response.text()
            except (TimeoutError, aiohttp.ClientError) as error:
                last = error
                if attempt + 1 < max_retries:
                    await asyncio.sleep(1)
    raise Unavailable(f"{url}: no answer in {max_retries} tries: {last!r}", field="url", value=url)


async def get(url: str) -> Any:
    """The JSON of the answer; one try."""
    return await post(url, {}, max_retries=1, action="get")
