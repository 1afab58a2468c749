"""/v1/chat/completions and /v1/completions, for agents that speak OpenAI's protocol."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from aiohttp import web
from jinja2 import TemplateError

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
    "top_logprobs",
))  # fmt: skip
OWN = frozenset(("messages", "prompt", "tools", "n", "stream", "logprobs", "echo", "chat_template_kwargs"))


async def chat(server: EngineServer, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise InvalidField("messages", messages, "a list of objects with role and content")
    for message in messages:
        for item in message.get("content") if isinstance(message.get("content"), list) else ():
            if isinstance(item, dict) and item.get("type") != "text":
                raise InvalidField("messages", item.get("type"), "text: /generate takes images, as image_data")
    tokenizer = server.loaded.tokenizer
    if not tokenizer.chat_template:
        raise InvalidField("messages", "given", "a prompt: the tokenizer of this model has no chat template")
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise InvalidField("chat_template_kwargs", extra, "an object")
    try:
        encoded = tokenizer.apply_chat_template(
            messages, **{"add_generation_prompt": True, **extra, "tools": body.get("tools"), "return_dict": True}
        )
    except TemplateError as error:
        raise InvalidField("messages", str(error), "messages that the chat template of this model takes") from error
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
    if body.get("echo"):
        raise InvalidField("echo", body["echo"], "false: an answer is what the model made")
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
    # Of /v1/completions a number says of how many tokens beside the one drawn, and 0 asks for that one.
    wanted = body.get("logprobs")
    log_probs = bool(wanted) if chat else wanted is not None and wanted is not False
    responses = [make_response(server.loaded, prompt, p, f"{head['id']}-{i}", "prompt") for i, p in enumerate(params)]
    if body.get("stream"):
        if count > 1:
            raise InvalidField("n", count, "1 with stream")
        from slime.rollout.engines.embedded.server import send_events

        return await send_events(request, _chunks(server, responses[0], head, chat=chat))
    await server.finish(responses)
    completion = sum(len(r.output_ids) for r in responses)
    return web.json_response(
        head
        | {
            "choices": [_choice(server, r, i, chat=chat, log_probs=log_probs) for i, r in enumerate(responses)],
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
        if type(given["sampling_seed"]) is not int:
            raise InvalidField("seed", given["sampling_seed"], "a whole number")
        given["sampling_seed"] += number
    if given.get("max_new_tokens") is None:
        given["max_new_tokens"] = max(1, server.loaded.context_length - len(prompt))
    return parse_sampling_params(given, "request")


def _choice(server: EngineServer, response: Response, index: int, *, chat: bool, log_probs: bool) -> dict[str, Any]:
    text = response_text(server.loaded, response)
    choice: dict[str, Any] = {"index": index, "finish_reason": _finish_reason(response), "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    if log_probs and not chat:
        tokens = [server.loaded.tokenizer.decode([t]) for t in response.output_ids]
        offsets = [0, *accumulate(map(len, tokens))][: len(tokens)]
        choice["logprobs"] = {
            "tokens": tokens, "token_logprobs": list(response.log_probs), "top_logprobs": None, "text_offset": offsets,
        }  # fmt: skip
    elif log_probs:
        tokens = [server.loaded.tokenizer.decode([t]) for t in response.output_ids]
        choice["logprobs"] = {
            "content": [
                {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
                for token, log_prob in zip(tokens, response.log_probs, strict=True)
            ]
        }
    return choice


async def _chunks(
    server: EngineServer, response: Response, head: dict[str, Any], *, chat: bool
) -> AsyncGenerator[Any, None]:
    head = head | {"object": "chat.completion.chunk" if chat else "text_completion"}
    sent, first = "", True
    async with contextlib.aclosing(server.tokens(response)) as tokens:
        async for _ in tokens:
            done = response.finish_reason is not None
            text = response_text(server.loaded, response)
            if not done:
                text = _settled(text, response.params.stop)
            if not done and len(text) <= len(sent):
                continue
            delta = {"content": text[len(sent) :]} | ({"role": "assistant"} if first else {})
            choice: dict[str, Any] = {"index": 0, "finish_reason": _finish_reason(response) if done else None}
            yield head | {"choices": [choice | ({"delta": delta} if chat else {"text": text[len(sent) :]})]}
            sent, first = text, False


def _settled(text: str, stops: tuple[str, ...]) -> str:
    """`text` without an end that later tokens may change: the start of a stop string, or of a character."""
    text = text.rstrip("\ufffd")
    starts = (text.rfind(stop[:n]) for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: min(starts, default=len(text))]


def _finish_reason(response: Response) -> str:
    return (response.finish_reason or {}).get("type", "stop")
