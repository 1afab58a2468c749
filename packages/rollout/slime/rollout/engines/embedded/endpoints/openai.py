"""/v1/chat/completions and /v1/completions, for agents that speak OpenAI's protocol."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from aiohttp import web

from slime.rollout.chat.answers import parse_answer
from slime.rollout.chat.messages import clean
from slime.rollout.chat.openai_body import check_names, include_usage
from slime.rollout.chat.template import check_arguments, check_text, encode, render
from slime.rollout.engines.embedded.endpoints.generate import make_response, response_text
from slime.rollout.engines.embedded.endpoints.served_model import ServedModel, send_events
from slime.rollout.engines.embedded.model.params import SamplingParams, parse_sampling_params
from slime.rollout.engines.embedded.model.response import Response
from slime.types.errors import InvalidField

# OpenAI's name -> the engine's name.
SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "stop": "stop", "stop_token_ids": "stop_token_ids",
    "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "seed": "sampling_seed",
    "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos", "skip_special_tokens": "skip_special_tokens",
}  # fmt: skip
OWN = frozenset(("chat_template_kwargs", "logprobs", "messages", "n", "prompt", "stream", "stream_options", "tools"))
KNOWN = OWN | SAMPLING.keys()


async def chat(server: ServedModel, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    check_names(body, KNOWN)
    tokenizer = server.loaded.tokenizer
    messages = clean(body.get("messages"))
    arguments = check_arguments(tokenizer, body.get("chat_template_kwargs"))

    tools = body.get("tools")
    if tools and server.options.tool_call_parser is None:
        raise InvalidField("tools", "given", "none: the engine was started without --tool-call-parser")

    def tokens() -> list[int]:
        return encode(tokenizer, render(tokenizer, messages, tools, arguments), "messages")

    return await _answer(server, request, body, await server.workers.run("messages", tokens), chat=True)


async def complete(server: ServedModel, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    check_names(body, KNOWN)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        text = prompt
        prompt = await server.workers.run("prompt", lambda: server.loaded.tokenizer(text)["input_ids"])
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise InvalidField("prompt", prompt, "one text, or one list of token ids (several prompts: /generate)")
    return await _answer(server, request, body, prompt, chat=False)


async def _answer(
    server: ServedModel, request: web.Request, body: Mapping[str, Any], prompt: list[int], *, chat: bool
) -> web.StreamResponse:
    count = body.get("n") or 1
    if not isinstance(count, int) or not 1 <= count <= 128:
        raise InvalidField("n", count, "a whole number from 1 to 128")
    params = [_params(server, body, prompt, i) for i in range(count)]
    tools = chat and bool(body.get("tools"))
    model = body.get("model")
    head = {
        "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model if isinstance(model, str) and model else server.name,
    }
    # /v1/completions counts alternatives beside the sampled token, so that 0 asks for its log-prob alone.
    wanted = body.get("logprobs")
    log_probs = bool(wanted) if chat else wanted is not None and wanted is not False
    responses = [make_response(server.loaded, prompt, p, f"{head['id']}-{i}", "prompt") for i, p in enumerate(params)]
    if body.get("stream"):
        if count > 1:
            raise InvalidField("n", count, "1 with stream")
        options = {"chat": chat, "usage": include_usage(body), "log_probs": log_probs, "tools": tools}
        return await send_events(request, _chunks(server, responses[0], head, **options))
    await server.finish(responses)
    return web.json_response(
        head
        | {
            "choices": [
                _choice(server, r, i, chat=chat, log_probs=log_probs, tools=tools) for i, r in enumerate(responses)
            ],
            "usage": _usage(responses),
            "metadata": {"weight_version": responses[0].weight_version},
        }
    )


def _usage(responses: Sequence[Response]) -> dict[str, int]:
    """Token counts of the samples of one prompt, which counts once."""
    prompt, completion = len(responses[0].prompt_ids), sum(len(r.output_ids) for r in responses)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _params(server: ServedModel, body: Mapping[str, Any], prompt: list[int], number: int) -> SamplingParams:
    values: dict[str, Any] = {}
    for name, value in body.items():
        if name in SAMPLING:
            values[SAMPLING[name]] = value
    if values.get("sampling_seed") is not None:
        if type(values["sampling_seed"]) is not int:
            raise InvalidField("seed", values["sampling_seed"], "a whole number")
        values["sampling_seed"] += number
    if values.get("max_new_tokens") is None:
        values["max_new_tokens"] = max(1, server.loaded.context_length - len(prompt))
    return parse_sampling_params(values, "request")


def _choice(
    server: ServedModel, response: Response, index: int, *, chat: bool, log_probs: bool, tools: bool
) -> dict[str, Any]:
    text = response_text(server.loaded, response)
    choice: dict[str, Any] = {"index": index, "finish_reason": _finish_reason(response), "logprobs": None}
    if chat:
        message = parse_answer(text, tools=tools, reasoning=False)
        choice |= {"message": message, "finish_reason": _finish_reason(response, message)}
    else:
        choice["text"] = text
    if log_probs:
        choice["logprobs"] = _log_probs(server, response, chat=chat)
    return choice


def _log_probs(server: ServedModel, response: Response, *, chat: bool, first: int = 0) -> dict[str, Any]:
    """Log-probs of the tokens from `first` on, as far as they are known."""
    chosen = response.log_probs[first:]
    ids = response.output_ids[first : first + len(chosen)]
    tokens = [server.loaded.tokenizer.decode([t]) for t in ids]
    if chat:
        content = [
            {"token": token, "logprob": log_prob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, log_prob in zip(tokens, chosen, strict=True)
        ]
        return {"content": content}
    offsets = [0, *accumulate(map(len, tokens))][: len(tokens)]
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": None, "text_offset": offsets}


async def _chunks(
    server: ServedModel,
    response: Response,
    head: dict[str, Any],
    *,
    chat: bool,
    usage: bool,
    log_probs: bool,
    tools: bool,
) -> AsyncGenerator[Any, None]:
    head = head | {"object": "chat.completion.chunk" if chat else "text_completion"}
    sent, first, num_log_probs = "", True, 0
    async with contextlib.aclosing(server.tokens(response)) as tokens:
        async for _ in tokens:
            done = response.finish_reason is not None
            text = response_text(server.loaded, response)
            if not done:
                text = _settled(text, response.params.stop)
            # Only its end shows whether a text is a tool call.
            if not done and (tools or len(text) <= len(sent)):
                continue
            delta: dict[str, Any] = {"content": text[len(sent) :]} | ({"role": "assistant"} if first else {})
            if tools:
                delta = parse_answer(text, tools=True, reasoning=False)
                if "tool_calls" in delta:
                    delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta["tool_calls"])]
            choice: dict[str, Any] = {"index": 0, "finish_reason": _finish_reason(response, delta) if done else None}
            if log_probs:
                # Log-probs of text that is held back are sent with that text.
                choice["logprobs"] = _log_probs(server, response, chat=chat, first=num_log_probs)
                num_log_probs += len(choice["logprobs"]["content" if chat else "tokens"])
            yield head | {"choices": [choice | ({"delta": delta} if chat else {"text": text[len(sent) :]})]}
            sent, first = text, False
    if usage:
        yield head | {"choices": [], "usage": _usage([response])}


def _settled(text: str, stops: tuple[str, ...]) -> str:
    """Returns `text` without an end that later tokens may change: the start of a stop string, or of a character."""
    text = text.rstrip("\ufffd")
    starts = (text.rfind(stop[:n]) for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: min(starts, default=len(text))]


def _finish_reason(response: Response, message: Mapping[str, Any] | None = None) -> str:
    reason = str((response.finish_reason or {}).get("type", "stop"))
    return "tool_calls" if reason == "stop" and message and message.get("tool_calls") else reason
