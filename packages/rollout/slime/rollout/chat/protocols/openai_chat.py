"""OpenAI's protocols for chat completions and for the older plain-text completions."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

from slime.rollout.chat.fields import (
    Neutral,
    check_body,
    check_names,
    common_fields,
    stop_texts,
)
from slime.rollout.chat.messages import clean
from slime.rollout.chat.pieces import JSON, Content, Piece, Reasoning, ToolCall
from slime.rollout.chat.protocols.base import Events, LogProbs, event, new_id
from slime.rollout.chat.request import Answer, ModelRequest
from slime.types.errors import InvalidField, SlimeError

# SGLang's names of sampling parameters, by OpenAI's names and by those that SGLang adds to the protocol.
SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "sampling_seed",
    "stop_token_ids": "stop_token_ids", "min_tokens": "min_new_tokens", "ignore_eos": "ignore_eos",
    "repetition_penalty": "repetition_penalty", "skip_special_tokens": "skip_special_tokens",
}  # fmt: skip
COMMON = SAMPLING.keys() | {"logprobs", "max_completion_tokens", "max_tokens", "n", "stop", "stream", "stream_options"}
OF_CHAT = COMMON | {"chat_template_kwargs", "messages", "tool_choice", "tools"}
OF_TEXT = COMMON | {"prompt"}
WITHOUT_EFFECT = frozenset((
    "metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user",
))  # fmt: skip
NEUTRAL: Neutral = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "suffix": (None, ""),
    "top_logprobs": (None, 0),
    "verbosity": (None,),
    "web_search_options": (None,),
}
WITHOUT_TOOLS = NEUTRAL | {"parallel_tool_calls": (None, False, True)}


class Completions(abc.ABC):
    """Answers and errors of both protocols, which differ in the form of their choices.

    kind: the `object` of an answer. prefix: the start of its id.
    """

    kind: ClassVar[str]
    prefix: ClassVar[str]

    @abc.abstractmethod
    def read(self, body: Any) -> ModelRequest: ...

    @abc.abstractmethod
    def choice(self, answer: Answer, log_probs: JSON | None) -> JSON: ...

    @abc.abstractmethod
    def log_probs(self, log_probs: LogProbs) -> JSON: ...

    @abc.abstractmethod
    def events(self, request: ModelRequest, model: str) -> Events: ...

    def head(self, model: str) -> JSON:
        return {"id": new_id(self.prefix), "object": self.kind, "created": int(time.time()), "model": model}

    def whole(self, request: ModelRequest, answers: Sequence[Answer], model: str) -> JSON:
        choices = []
        for index, answer in enumerate(answers):
            log_probs = self.log_probs(answer.log_probs) if answer.log_probs is not None else None
            choices.append({"index": index} | self.choice(answer, log_probs) | {"logprobs": log_probs})
        metadata = {"weight_version": answers[0].weight_version}
        return self.head(model) | {"choices": choices, "usage": usage(answers), "metadata": metadata}

    def error(self, error: SlimeError, status: int) -> JSON:
        return error_body(error, status)


class Chat(Completions):
    path = "/v1/chat/completions"
    kind = "chat.completion"
    prefix = "chatcmpl-"

    def read(self, body: Any) -> ModelRequest:
        body = check_body(body)
        check_names(body, OF_CHAT, WITHOUT_EFFECT, NEUTRAL if body.get("tools") else WITHOUT_TOOLS)
        return ModelRequest(
            messages=clean(body.get("messages")),
            tools=offered(body.get("tools"), body.get("tool_choice")),
            log_probs=bool(body.get("logprobs")),
            **_common(body),
        )

    def choice(self, answer: Answer, log_probs: JSON | None) -> JSON:
        return {"message": answer.message, "finish_reason": answer.finish_reason}

    def log_probs(self, log_probs: LogProbs) -> JSON:
        return {
            "content": [
                {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}
                for token, value in log_probs
            ]
        }

    def events(self, request: ModelRequest, model: str) -> Events:
        return _ChatEvents(self, request, model)


class Text(Completions):
    path = "/v1/completions"
    kind = "text_completion"
    prefix = "cmpl-"

    def read(self, body: Any) -> ModelRequest:
        body = check_body(body)
        check_names(body, OF_TEXT, WITHOUT_EFFECT, NEUTRAL)
        # Here logprobs is the number of alternatives: 0 asks for the log-prob of the sampled token alone.
        wanted = body.get("logprobs")
        return ModelRequest(
            prompt=body.get("prompt"), log_probs=wanted is not None and wanted is not False, **_common(body)
        )

    def choice(self, answer: Answer, log_probs: JSON | None) -> JSON:
        return {"text": answer.message["content"], "finish_reason": answer.finish_reason}

    def log_probs(self, log_probs: LogProbs) -> JSON:
        tokens = [token for token, _ in log_probs]
        offsets = [0, *accumulate(map(len, tokens))][: len(tokens)]
        values = [value for _, value in log_probs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}

    def events(self, request: ModelRequest, model: str) -> Events:
        return _Events(self, request, model)


class _Events:
    """Events of plain-text answers; those of a chat differ only in the content of a choice."""

    def __init__(self, protocol: Completions, request: ModelRequest, model: str) -> None:
        self._protocol = protocol
        self._request = request
        self._head = protocol.head(model)

    def begin(self, prompt_tokens: int) -> list[bytes]:
        return []

    def contents(self, pieces: Sequence[Piece]) -> list[JSON]:
        """Returns the content of a chunk's choice for each piece that has one."""
        return [{"text": piece.text} for piece in pieces if isinstance(piece, Content)]

    nothing: JSON = {"text": ""}

    def pieces(self, pieces: Sequence[Piece], log_probs: LogProbs | None) -> list[bytes]:
        choices = self.contents(pieces)
        chunks: list[JSON] = [{"index": 0, "finish_reason": None, "logprobs": None} | each for each in choices]
        if chunks and log_probs is not None:
            chunks[0]["logprobs"] = self._protocol.log_probs(log_probs)
        return [event(self._head | {"choices": [chunk]}) for chunk in chunks]

    def end(self, answer: Answer) -> list[bytes]:
        log_probs = None if answer.log_probs is None else self._protocol.log_probs(answer.log_probs)
        choice = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": log_probs} | self.nothing
        chunks: list[JSON] = [self._head | {"choices": [choice]}]
        if self._request.with_usage:
            chunks.append(self._head | {"choices": [], "usage": usage([answer])})
        return [*map(event, chunks), event("[DONE]")]

    def error(self, error: SlimeError, status: int) -> list[bytes]:
        return [event(self._protocol.error(error, status)), event("[DONE]")]


class _ChatEvents(_Events):
    nothing: JSON = {"delta": {}}

    def __init__(self, protocol: Completions, request: ModelRequest, model: str) -> None:
        super().__init__(protocol, request, model)
        self._head["object"] = "chat.completion.chunk"
        self._calls = 0

    def begin(self, prompt_tokens: int) -> list[bytes]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}
        return [event(self._head | {"choices": [choice]})]

    def contents(self, pieces: Sequence[Piece]) -> list[JSON]:
        return [{"delta": self._delta(piece)} for piece in pieces]

    def _delta(self, piece: Piece) -> JSON:
        if isinstance(piece, Content):
            return {"content": piece.text}
        if isinstance(piece, Reasoning):
            return {"reasoning_content": piece.text}
        return {"tool_calls": [self._call(piece)]}

    def _call(self, call: ToolCall) -> JSON:
        self._calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": self._calls - 1, "id": call.id, "type": "function", "function": function}


def _common(body: JSON) -> JSON:
    """Returns the arguments of a `ModelRequest` that both protocols share. Raises InvalidField."""
    count = body.get("n")
    if count is not None and (type(count) is not int or not 1 <= count <= 128):
        raise InvalidField("n", count, "a whole number from 1 to 128")
    limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    common = common_fields(body, SAMPLING, limit)
    if common["stream"] and (count or 1) > 1:
        raise InvalidField("n", count, "1 with stream")
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        raise InvalidField("seed", seed, "a whole number")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise InvalidField("stream_options", options, "an object")
    return common | {
        "stops": stop_texts(body, "stop"),
        "count": count or 1,
        "with_usage": bool((options or {}).get("include_usage")),
    }


def offered(tools: Any, choice: Any) -> list[JSON] | None:
    """Returns the tools that the model may call: the request's, or None if `tool_choice` forbids calls.

    Raises InvalidField for malformed tools, and for a choice that would force a call.
    """
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InvalidField("tools", tools, "a list of objects")
    if choice not in (None, "auto", "none"):
        raise InvalidField("tool_choice", choice, "auto or none: a call cannot be forced here")
    return tools if tools and choice != "none" else None


def usage(answers: Sequence[Answer]) -> JSON:
    """Returns the token counts of all answers to one prompt; the prompt counts once."""
    prompt, completion = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }  # fmt: skip


def error_body(error: SlimeError, status: int) -> JSON:
    """Returns an error as OpenAI's clients expect it, with the field, the value and the expectation added, as in errors
    of the engine's other calls."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {
        "error": {
            "message": str(error), "type": kind, "param": error.field or None, "code": status,
            "field": error.field, "value": error.value, "expected": error.expected,
        }
    }  # fmt: skip
