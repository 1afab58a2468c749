"""/v1/chat/completions and /v1/completions, for agents that speak OpenAI's protocol."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web

from slime.rollout.engines.embedded.decode import Response
from slime.rollout.engines.embedded.generate import make_response, response_text
from slime.rollout.engines.embedded.params import SamplingParams, parse_sampling_params
from slime.types.errors import InvalidField

if TYPE_CHECKING:
    from slime.rollout.engines.embedded.server import EngineServer

# Their name -> ours.
SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "stop": "stop", "stop_token_ids": "stop_token_ids",
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "seed": "sampling_seed",
    "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos", "skip_special_tokens": "skip_special_tokens",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty",
}  # fmt: skip
WITHOUT_EFFECT = frozenset((
    "model", "user", "metadata", "stream_options", "store", "tool_choice", "parallel_tool_calls",
    "top_logprobs", "echo",
))  # fmt: skip
OWN = frozenset(("messages", "prompt", "tools", "n", "stream", "logprobs", "chat_template_kwargs"))


async def chat(server: EngineServer, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InvalidField("messages", messages, "a list of objects with role and content")
    tokenizer = server.loaded.tokenizer
    if not tokenizer.chat_template:
        raise InvalidField("messages", "given", "a prompt: the tokenizer of this model has no chat template")
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=body.get("tools"),
        add_generation_prompt=True,
        return_dict=True,
        **(body.get("chat_template_kwargs") or {}),
    )
    return await _answer(server, request, body, list(encoded["input_ids"]), chat=True)


async def complete(server: EngineServer, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompt = server.loaded.tokenizer(prompt)["input_ids"]
    if not isinstance(prompt, list):
        raise InvalidField("prompt", prompt, "a text or a list of token ids")
    return await _answer(server, request, body, prompt, chat=False)


async def _answer(
    server: EngineServer, request: web.Request, body: Mapping[str, Any], prompt: list[int], *, chat: bool
) -> web.StreamResponse:
    count = body.get("n") or 1
    if not isinstance(count, int) or not 1 <= count <= 128:
        raise InvalidField("n", count, "a whole number from 1 to 128")
    params = [_params(server, body, prompt, i) for i in range(count)]
    head = {
        "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": body.get("model") or server.name,
    }
    responses = [make_response(server.loaded, prompt, p, f"{head['id']}-{i}", "prompt") for i, p in enumerate(params)]
    if body.get("stream"):
        if count > 1:
            raise InvalidField("n", count, "1 with stream")
        return await _stream(server, request, responses[0], head, chat=chat)
    await server.finish(responses)
    completion = sum(len(r.output_ids) for r in responses)
    return web.json_response(
        head
        | {
            "choices": [
                _choice(server, r, i, chat=chat, log_probs=bool(body.get("logprobs"))) for i, r in enumerate(responses)
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": completion,
                "total_tokens": len(prompt) + completion,
            },
            "metadata": {"weight_version": responses[0].weight_version},
        }
    )


def _params(server: EngineServer, body: Mapping[str, Any], prompt: list[int], number: int) -> SamplingParams:
    given: dict[str, Any] = {}
    for name, value in body.items():
        if name in SAMPLING:
            given[SAMPLING[name]] = value
        elif name not in WITHOUT_EFFECT and name not in OWN:
            raise InvalidField(name, value, f"one of {', '.join(sorted(SAMPLING.keys() | OWN))}")
    if given.get("sampling_seed") is not None:
        given["sampling_seed"] += number
    if given.get("max_new_tokens") is None:
        given["max_new_tokens"] = max(1, server.loaded.context_length - len(prompt))
    return parse_sampling_params(given, "request")


def _choice(server: EngineServer, response: Response, index: int, *, chat: bool, log_probs: bool) -> dict[str, Any]:
    text = response_text(server.loaded, response)
    choice: dict[str, Any] = {"index": index, "finish_reason": _finish_reason(response), "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    if log_probs:
        tokens = [server.loaded.tokenizer.decode([t]) for t in response.output_ids]
        choice["logprobs"] = {
            "content": [
                {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, log_prob in zip(tokens, response.log_probs, strict=True)
            ]
        }
    return choice


async def _stream(
    server: EngineServer, request: web.Request, response: Response, head: dict[str, Any], *, chat: bool
) -> web.StreamResponse:
    from slime.rollout.engines.embedded.server import send_event

    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    head = head | {"object": "chat.completion.chunk" if chat else "text_completion"}

    async def send(text: str, reason: str | None, role: bool = False) -> None:
        delta: dict[str, Any] = {"content": text} | ({"role": "assistant"} if role else {})
        choice = {"index": 0, "finish_reason": reason} | ({"delta": delta} if chat else {"text": text})
        await send_event(stream, head | {"choices": [choice]})

    sent = ""
    async for _ in server.tokens(response):
        text = response_text(server.loaded, response)
        done = response.finish_reason is not None
        # A character of several tokens is not whole before its last one.
        if not done and (text.endswith("\ufffd") or not text.startswith(sent)):
            continue
        if text != sent or done:
            await send(text[len(sent) :], _finish_reason(response) if done else None, role=not sent)
            sent = text
    await send_event(stream, "[DONE]")
    return stream


def _finish_reason(response: Response) -> str:
    return (response.finish_reason or {}).get("type", "stop")
