"""Serves `/v1/chat/completions` and the other protocols of agents from the loaded model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence

from slime.rollout.chat.answers import AnswerReader
from slime.rollout.chat.protocols.base import new_id
from slime.rollout.chat.request import Answer, Generated, ModelRequest
from slime.rollout.chat.syntaxes.registry import AnswerSyntax
from slime.rollout.chat.template import encode, render
from slime.rollout.engines.embedded.endpoints.generate import make_response
from slime.rollout.engines.embedded.endpoints.served_model import ServedModel
from slime.rollout.engines.embedded.model.params import SamplingParams, parse_sampling_params
from slime.rollout.engines.embedded.model.response import Response
from slime.types.errors import InvalidField


class ServedChat:
    """An `AgentBackend` that takes sampling parameters from each request."""

    def __init__(self, server: ServedModel) -> None:
        self._server = server
        self.tokenizer = server.loaded.tokenizer
        self.workers = server.workers
        self.model = server.name
        self._syntax = AnswerSyntax(server.options.tool_call_parser, server.options.reasoning_parser)

    def check(self, request: ModelRequest) -> None:
        if request.tools and self._syntax.tool_calls is None:
            raise InvalidField("tools", "given", "none: the engine was started without --tool-call-parser")
        self._params(request, 0)

    def render(self, request: ModelRequest) -> list[int]:
        text = render(self.tokenizer, request.messages or [], request.tools, request.template_arguments or {})
        return encode(self.tokenizer, text, "messages")

    def reader(self, request: ModelRequest, prompt: Sequence[int]) -> AnswerReader:
        ends = self._server.loaded.eos_ids | self._params(request, 0).stop_token_ids
        return AnswerReader(self.tokenizer, request, prompt, self._syntax, stops=request.stops, end_ids=ends)

    async def finish(self, request: ModelRequest, prompt: list[int]) -> list[Generated]:
        responses = self._responses(request, prompt)
        await self._server.finish(responses)
        return [_generated(response) for response in responses]

    async def stream(self, request: ModelRequest, prompt: list[int]) -> AsyncGenerator[Generated, None]:
        (response,) = self._responses(request, prompt)
        async with contextlib.aclosing(self._server.tokens(response)) as tokens:
            async for _ in tokens:
                yield _generated(response)

    def record(self, request: ModelRequest, answer: Answer) -> None:
        return None

    def _responses(self, request: ModelRequest, prompt: list[int]) -> list[Response]:
        id = new_id("agent-")
        return [
            make_response(self._server.loaded, prompt, self._params(request, i), f"{id}-{i}", "prompt")
            for i in range(request.count)
        ]

    def _params(self, request: ModelRequest, number: int) -> SamplingParams:
        values = dict(request.sampling)
        if values.get("sampling_seed") is not None:
            values["sampling_seed"] += number
        # `make_response` lowers the limit to what the context leaves.
        limit = request.max_tokens or self._server.loaded.context_length
        return parse_sampling_params(values | {"stop": request.stops, "max_new_tokens": limit}, "request")


def _generated(response: Response) -> Generated:
    # Read first: once the reason is set, no more tokens follow.
    reason = response.finish_reason
    log_probs = response.log_probs[:]
    return Generated(
        prompt_tokens=len(response.prompt_ids),
        ids=response.output_ids[: len(log_probs)],
        log_probs=log_probs,
        finish_reason=reason,
        cached_tokens=response.cached_tokens,
        weight_version=response.weight_version,
    )
