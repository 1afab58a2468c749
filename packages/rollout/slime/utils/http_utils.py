"""Compatibility: `slime.utils.http_utils`, HTTP and ports as code written for slime uses them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, TypeAlias

import aiohttp
import numpy as np

from slime.rollout.engines.keys import engine_headers
from slime.rollout.generate.seeds import SEEDS
from slime.types.errors import Unavailable, counted
from slime.utils.misc import get_current_node_ip, get_free_port, is_port_available

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

__all__ = [
    "find_available_port", "get", "get_host_info", "get_rollout_num_engines", "init_http_client", "is_port_available",
    "post",
]  # fmt: skip

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 14400.0
# Maximum characters of a refusal in the log and the error.
LONGEST_REASON = 1000
# Less than the 5 s after which uvicorn, and so SGLang, closes an idle connection.
KEEPALIVE_SECONDS = 4.0

Session: TypeAlias = AsyncGenerator[aiohttp.ClientSession, None]
_SESSIONS: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, Session]] = {}


def _dumps(payload: Any) -> str:
    """Encodes as JSON, with the arrays of a sample as lists and their scalars as numbers."""
    return json.dumps(payload, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


async def post(
    url: str,
    payload: dict[str, Any],
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    action: str = "post",
) -> Any:
    """Returns the answer's JSON, whatever its content type, or its text if it is not JSON. Tries again after a second
    if the server fails or does not answer; raises Unavailable, with its last answer, after the last try.
    Calls to the engines of a run carry their API key.
    """
    headers = {**engine_headers(url), **(headers or {})}
    last = ""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    seeds = SEEDS.get()
    payload = payload or {}
    if seeds is not None:
        payload = seeds.fill(payload)
    session = await _session()
    for attempt in range(max_retries):
        try:
            async with session.request(action.upper(), url, json=payload, headers=headers, timeout=timeout) as response:
                body = await response.text()
                if response.status < 400:
                    return _loaded(body)
                last = f"{response.status}: {body[:LONGEST_REASON]}"
        except (TimeoutError, aiohttp.ClientError) as error:
            last = repr(error)
        if attempt + 1 < max_retries:
            log.warning("%s: try %d of %d: %s", url, attempt + 1, max_retries, last)
            await asyncio.sleep(1)
    raise Unavailable(f"{url}: no answer in {counted(max_retries, 'try')}: {last}", field="url", value=url)


async def _session() -> aiohttp.ClientSession:
    """Returns the session of the running loop, whose calls share connections."""
    loop = asyncio.get_running_loop()
    known = _SESSIONS.get(loop)
    if known is None:
        for other in [other for other in _SESSIONS if other.is_closed()]:
            _SESSIONS.pop(other, None)
        owner = _owner(loop)
        known = _SESSIONS[loop] = (await anext(owner), owner)
    return known[0]


async def _owner(loop: asyncio.AbstractEventLoop) -> Session:
    # A loop ends the generators that were begun on it before it is closed.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), json_serialize=_dumps
    ) as session:
        try:
            yield session
        finally:
            _SESSIONS.pop(loop, None)


def _loaded(body: str) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body


async def get(url: str) -> Any:
    """Returns the JSON of the answer; one try."""
    return await post(url, {}, max_retries=1, action="get")


def init_http_client(args: RolloutArgs) -> None:
    """Does nothing: the first call on an event loop makes its pool of connections."""


def get_rollout_num_engines(args: RolloutArgs) -> int:
    """Returns the number of engines of the run."""
    urls = getattr(args, "rollout_engine_urls", None)
    if urls is not None:
        return len(urls)
    return max(1, (args.rollout_num_gpus or 1) // args.rollout_num_gpus_per_engine)


def find_available_port(base_port: int) -> int:
    """Returns a free port, from `base_port` on. Raises OSError where there is none."""
    return get_free_port(base_port)


def get_host_info() -> tuple[str, str]:
    """Returns (name, address) of this machine."""
    return socket.gethostname(), get_current_node_ip()
