"""A reward model behind HTTP: {prompt, response, label} is posted to `--rm-url`, and the JSON answer is the reward."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import aiohttp

from slime.rollout.engines.keys import engine_headers
from slime.rollout.models.addresses import reward_url
from slime.types import Sample
from slime.types.errors import InvalidSetting, Unavailable, counted

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

TRIES = 10
TIMEOUT_SECONDS = 120.0


async def remote_rm(args: RolloutArgs, sample: Sample, max_retries: int = TRIES) -> Any:
    """Asks --rm-url for the reward.

    Waits min(2^k, 30) seconds, and up to one second more, after failed try k, counted from 0. Raises Unavailable after
    the last try, InvalidSetting without --rm-url.
    """
    if not args.rm_url:
        raise InvalidSetting.requires("--rm-type remote_rm", "--rm-url URL")
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await ask(reward_url(args), payload, max_retries)


async def ask(url: str, payload: dict[str, Any], max_retries: int = TRIES) -> Any:
    """Posts to --rm-url and returns the JSON of its answer; waits and raises as `remote_rm`."""
    last: Exception | None = None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)) as session:
        for attempt in range(max_retries):
            try:
                async with session.post(url, json=payload, headers=engine_headers(url)) as response:
                    response.raise_for_status()
                    return await response.json()
            except (TimeoutError, aiohttp.ClientError) as error:
                last = error
                if attempt + 1 < max_retries:
                    await asyncio.sleep(min(2**attempt, 30) + random.random())
    tries = counted(max_retries, "try")
    raise Unavailable(f"--rm-url {url}: no answer in {tries}: {last!r}", field="--rm-url", value=url)
