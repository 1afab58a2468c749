"""The loaded model behind the endpoints, which give it sequences and wait for their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.rollout.doors import Workers
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.response import Response
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.scheduling.scheduler import Scheduler
from slime.types.errors import SlimeError, Unavailable

log = logging.getLogger(__name__)

MOST_WAITING = 1 << 18  # sequences


class ServedModel:
    """A loaded model and its scheduler.

    name: the model's name in /v1/models. workers: threads for rendering and tokenizing, which take long for long texts.
    """

    def __init__(self, loaded: Loaded, scheduler: Scheduler, options: EmbeddedOptions) -> None:
        self.loaded = loaded
        self.scheduler = scheduler
        self.options = options
        self.name = options.served_model_name or Path(options.model_path).name
        self.workers = Workers("render")

    async def finish(self, responses: list[Response]) -> None:
        """Waits until all responses have finished, or ends them when the client disconnects. Raises Unavailable if too
        many sequences wait already."""
        if self.scheduler.num_waiting + len(responses) > MOST_WAITING:
            raise Unavailable(f"{MOST_WAITING} sequences wait already", field="input_ids", value=len(responses))
        submitted = self.scheduler.submit(responses)
        try:
            await asyncio.wrap_future(submitted.done)
        except asyncio.CancelledError:
            self.scheduler.withdraw(submitted)
            raise

    async def tokens(self, response: Response) -> AsyncGenerator[None, None]:
        """Yields whenever there are new tokens, and once more when the response has finished."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        response.on_token = lambda: loop.call_soon_threadsafe(arrived.set)
        task = asyncio.ensure_future(self.finish([response]))
        task.add_done_callback(lambda _: arrived.set())
        try:
            while not task.done():
                await arrived.wait()
                arrived.clear()
                if not task.done() and response.finish_reason is None:
                    yield
            task.result()
            yield
        finally:
            task.cancel()


async def send_events(request: web.Request, events: AsyncGenerator[Any, None]) -> web.StreamResponse:
    """Sends server-sent events and [DONE]. Errors become events with `error`, because the head is sent by then."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    try:
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    await stream.write(f"data: {json.dumps(event)}\n\n".encode())
        except SlimeError as error:
            await stream.write(f"data: {json.dumps({'error': error_detail(error)})}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        log.info("the client of a stream went away")
    return stream


def error_detail(error: SlimeError) -> dict[str, str]:
    return {
        "type": type(error).__name__, "message": error.message, "field": error.field, "value": error.value,
        "expected": error.expected,
    }  # fmt: skip
