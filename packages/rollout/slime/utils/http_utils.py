"""`slime.utils.http_utils`: `post` and `get` as code written for slime calls them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np

from slime.types.errors import Unavailable

TIMEOUT_SECONDS = 14400.0


def _dumps(payload: Any) -> str:
    """As JSON; the arrays that hold a sample's tokens, and numbers of them, as what they are elsewhere: lists."""
    return json.dumps(payload, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


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
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, json_serialize=_dumps) as session:
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
