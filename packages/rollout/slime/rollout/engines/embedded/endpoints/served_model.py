"""The loaded model behind the endpoints, which give it sequences and wait for their tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass
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
# The HTTP status of a SlimeError, by its gRPC status; other exceptions have status 500.
HTTP_STATUS = {
    "INVALID_ARGUMENT": 400, "NOT_FOUND": 400, "UNIMPLEMENTED": 400, "UNAUTHENTICATED": 401, "FAILED_PRECONDITION": 409,
    "DATA_LOSS": 409,
    "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip


@dataclass(frozen=True)
class TokenProgress:
    """The first `tokens` tokens of response `index` of a request are there; `finished`: they are all."""

    index: int
    tokens: int
    finished: bool


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

    async def progress(self, responses: Sequence[Response]) -> AsyncGenerator[Collection[TokenProgress], None]:
        """Yields the progress of the responses to one request: of each after every `stream_interval` tokens, and when
        it has finished."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        news: deque[TokenProgress] = deque()
        for index, response in enumerate(responses):
            response.on_token = _reporter(index, response, news, lambda: loop.call_soon_threadsafe(arrived.set))
        task = asyncio.ensure_future(self.finish(list(responses)))
        task.add_done_callback(lambda _: arrived.set())
        unfinished = set(range(len(responses)))
        try:
            while not task.done():
                await arrived.wait()
                arrived.clear()
                reported = [news.popleft() for _ in range(len(news))]
                if latest := {each.index: each for each in reported}:
                    unfinished -= {each.index for each in reported if each.finished}
                    yield latest.values()
            task.result()
            # The rest was ended without a further token.
            yield [TokenProgress(index, len(responses[index].log_probs), True) for index in sorted(unfinished)]
        finally:
            task.cancel()


def _reporter(
    index: int, response: Response, news: deque[TokenProgress], wake: Callable[[], object]
) -> Callable[[], None]:
    def report() -> None:
        tokens, finished = len(response.log_probs), response.finish_reason is not None
        if finished or tokens % response.params.stream_interval == 0:
            news.append(TokenProgress(index, tokens, finished))
            wake()

    return report


async def send_events(request: web.Request, events: AsyncGenerator[list[Any], None]) -> web.StreamResponse:
    """Sends server-sent events, those of each list at once, and [DONE]. Errors become events with `error`, because the
    head is sent by then."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    try:
        try:
            async with contextlib.aclosing(events):
                async for together in events:
                    await stream.write("".join(f"data: {json.dumps(event)}\n\n" for event in together).encode())
        except SlimeError as error:
            detail = error_detail(error) | {"code": http_status(error)}
            await stream.write(f"data: {json.dumps({'error': detail})}\n\n".encode())
        await stream.write(b"data: [DONE]\n\n")
    except ConnectionResetError:
        log.info("the client of a stream went away")
    return stream


def http_status(error: SlimeError) -> int:
    return getattr(error, "http_status", None) or HTTP_STATUS.get(error.status, 500)


def error_detail(error: SlimeError) -> dict[str, str]:
    return {
        "type": type(error).__name__, "message": error.message, "field": error.field, "value": error.value,
        "expected": error.expected,
    }  # fmt: skip
