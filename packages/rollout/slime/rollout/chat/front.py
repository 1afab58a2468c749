"""The HTTP API of a model for agents: requests of every protocol, answered whole or as a stream.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens

The embedded engine and the agents' gateway both serve it, each with an `AgentBackend` of its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from aiohttp import web

from slime.rollout.chat.answers import AnswerReader
from slime.rollout.chat.protocols import base
from slime.rollout.chat.protocols.anthropic_messages import Messages
from slime.rollout.chat.protocols.openai_chat import Chat, Text
from slime.rollout.chat.protocols.openai_responses import Responses
from slime.rollout.chat.request import Answer, Generated, ModelRequest
from slime.rollout.chat.template import check_arguments, encode
from slime.rollout.doors import Workers
from slime.types.errors import InvalidField, SlimeError

log = logging.getLogger(__name__)

PROTOCOLS: tuple[base.Protocol, ...] = (Chat(), Text(), Responses(), Messages())
COUNT_TOKENS = "/v1/messages/count_tokens"
PATHS = (*(protocol.path for protocol in PROTOCOLS), COUNT_TOKENS)
HTTP_STATUS = {
    "INVALID_ARGUMENT": 400, "UNIMPLEMENTED": 400, "UNAUTHENTICATED": 401, "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 503, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip


class AgentBackend(Protocol):
    """Answers one request.

    tokenizer: the model's. workers: threads for rendering and tokenizing. model: the name of the model in answers to
    requests that give none.
    """

    tokenizer: Any
    workers: Workers
    model: str

    def check(self, request: ModelRequest) -> None:
        """Raises InvalidField for a request that this backend does not serve."""

    def render(self, request: ModelRequest) -> list[int]:
        """Returns the token ids of the request's messages, followed by the start of an answer. Runs in a thread.

        Raises InvalidField.
        """

    def reader(self, request: ModelRequest, prompt: Sequence[int]) -> AnswerReader: ...

    async def finish(self, request: ModelRequest, prompt: list[int]) -> list[Generated]:
        """Generates `request.count` answers."""

    def stream(self, request: ModelRequest, prompt: list[int]) -> AsyncGenerator[Generated, None]:
        """Yields one answer as it grows, each time with all tokens so far, and once more when it is complete."""

    def record(self, request: ModelRequest, answer: Answer) -> None:
        """Called with each complete answer before it is sent to the client."""


class Front:
    """Answers requests of agents. read_json: reads a body within limits. open: returns the backend of a request."""

    def __init__(
        self, read_json: Callable[[web.Request], Awaitable[Any]], open: Callable[[web.Request], AgentBackend]
    ) -> None:
        self._read_json = read_json
        self._open = open

    def add_routes(self, application: web.Application, prefix: str = "") -> None:
        for protocol in PROTOCOLS:
            application.router.add_post(prefix + protocol.path, self._handler(protocol))
        application.router.add_post(prefix + COUNT_TOKENS, self._count)

    def _handler(self, protocol: base.Protocol) -> Any:
        async def handle(http_request: web.Request) -> web.StreamResponse:
            backend = self._open(http_request)
            request = protocol.read(await self._read_json(http_request))
            backend.check(request)
            prompt = await _encode(backend, request)
            if request.stream:
                return await _stream(http_request, protocol, backend, request, prompt)
            answers = []
            for generated in await backend.finish(request, prompt):
                reader = backend.reader(request, prompt)
                reader.read(generated)
                answer = reader.answer(generated, reader.log_probs(generated) if request.log_probs else None)
                backend.record(request, answer)
                answers.append(answer)
            return web.json_response(protocol.whole(request, answers, request.model or backend.model))

        return handle

    async def _count(self, http_request: web.Request) -> web.Response:
        backend = self._open(http_request)
        request = Messages().read(await self._read_json(http_request))
        return web.json_response({"input_tokens": len(await _encode(backend, request))})


async def _encode(backend: AgentBackend, request: ModelRequest) -> list[int]:
    """Returns the token ids of a request's messages or prompt. Raises InvalidField."""
    if request.messages is not None:
        check_arguments(backend.tokenizer, request.template_arguments)
        return await backend.workers.run("messages", lambda: backend.render(request))
    prompt = request.prompt
    if isinstance(prompt, str):
        return await backend.workers.run("prompt", lambda: encode(backend.tokenizer, prompt, "prompt"))
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int for token in prompt):
        raise InvalidField("prompt", prompt, "a text or a list of token ids, not empty; one prompt per request")
    return prompt


async def _stream(
    http_request: web.Request, protocol: base.Protocol, backend: AgentBackend, request: ModelRequest, prompt: list[int]
) -> web.StreamResponse:
    """Sends an answer as events. An error before the first token sets the HTTP status; a later one is an event."""
    reader = backend.reader(request, prompt)
    events = protocol.events(request, request.model or backend.model)
    async with contextlib.aclosing(backend.stream(request, prompt)) as parts:
        generated = await anext(parts)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http_request)
        waiting: base.LogProbs = []
        try:
            for event in events.begin(len(prompt)):
                await response.write(event)
            while True:
                pieces = reader.read(generated)
                if request.log_probs:
                    waiting += reader.log_probs(generated)
                if generated.finish_reason is not None:
                    break
                if pieces:
                    # Log-probs of text that is held back are sent with that text.
                    log_probs, waiting = waiting, []
                    await _write(response, events.pieces(pieces, log_probs if request.log_probs else None))
                generated = await anext(parts)
            answer = reader.answer(generated, waiting if request.log_probs and not pieces else None)
            backend.record(request, answer)
            await _write(response, events.pieces(pieces, waiting if request.log_probs else None))
            await _write(response, events.end(answer))
        except SlimeError as error:
            await _write(response, events.error(error, status_of(error)))
        except ConnectionResetError:
            log.info("the client of a stream went away")
        await response.write_eof()
    return response


async def _write(response: web.StreamResponse, events: Sequence[bytes]) -> None:
    if events:
        await response.write(b"".join(events))


def status_of(error: SlimeError) -> int:
    return getattr(error, "http_status", None) or HTTP_STATUS.get(error.status, 500)


def refusal(path: str, error: SlimeError) -> web.Response | None:
    """Returns an error response in the form of the request's protocol; None where no protocol has this path."""
    protocol: base.Protocol | None = Messages() if path.endswith(COUNT_TOKENS) else None
    for each in PROTOCOLS:
        if path.endswith(each.path):
            protocol = each
    if protocol is None:
        return None
    status = status_of(error)
    response = web.json_response(protocol.error(error, status), status=status)
    if status in (408, 413):
        # Closes the connection instead of waiting for the rest of the body.
        response.force_close()
    return response
