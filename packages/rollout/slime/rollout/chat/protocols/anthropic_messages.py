"""Anthropic's messages protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.rollout.chat.fields import (
    Neutral,
    check_body,
    check_names,
    common_fields,
    is_neutral,
    stop_texts,
    text_of,
)
from slime.rollout.chat.messages import clean
from slime.rollout.chat.pieces import JSON, Content, Piece, Reasoning, ToolCall
from slime.rollout.chat.protocols.base import Events, LogProbs, event, new_id
from slime.rollout.chat.request import Answer, ModelRequest
from slime.rollout.chat.syntaxes.base import load_object
from slime.types.errors import InvalidField, SlimeError

SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
KNOWN = SAMPLING.keys() | {
    "chat_template_kwargs", "max_tokens", "messages", "stop_sequences", "stream", "system", "tool_choice", "tools",
}  # fmt: skip
WITHOUT_EFFECT = frozenset(("cache_control", "metadata", "model", "user_profile_id", "workspace_id"))
NEUTRAL: Neutral = {
    "container": (None,),
    "diagnostics": (None,),
    "context_management": (None, {}, {"edits": []}),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "output_config": (None, {}),
    "output_format": (None,),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    # These ask for nothing here: the model reasons as much as it was trained to.
    "thinking": (None, {"type": "disabled"}, {"type": "adaptive"}),
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class Messages:
    path = "/v1/messages"

    def read(self, body: Any) -> ModelRequest:
        body = check_body(body)
        check_names(body, KNOWN, WITHOUT_EFFECT, NEUTRAL)
        return ModelRequest(
            messages=clean([*_system(body), *_messages(body.get("messages"))]),
            tools=_tools(body),
            stops=stop_texts(body, "stop_sequences"),
            **common_fields(body, SAMPLING, limit="max_tokens"),
        )

    def whole(self, request: ModelRequest, answers: Sequence[Answer], model: str) -> JSON:
        (answer,) = answers
        message = answer.message
        content: list[JSON] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            content.append(
                {"type": "tool_use", "id": call["id"], "name": function["name"],
                 "input": load_object(function["arguments"]) or {}}
            )  # fmt: skip
        return _head(model) | {"content": content, **_stop(answer), "usage": _usage(answer)}

    def events(self, request: ModelRequest, model: str) -> Events:
        return _Events(self, model)

    def error(self, error: SlimeError, status: int) -> JSON:
        kind = ERRORS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


class _Events:
    """Events of an answer: consecutive pieces of one kind form one content block."""

    def __init__(self, protocol: Messages, model: str) -> None:
        self._protocol = protocol
        self._model = model
        self._index = -1
        self._open: type[Piece] | None = None

    def begin(self, prompt_tokens: int) -> list[bytes]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = _head(self._model) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return [_event("message_start", {"message": message})]

    def pieces(self, pieces: Sequence[Piece], log_probs: LogProbs | None) -> list[bytes]:
        return [each for piece in pieces for each in self._piece_events(piece)]

    def _piece_events(self, piece: Piece) -> list[bytes]:
        events: list[bytes] = []
        if isinstance(piece, ToolCall) or self._open is not type(piece):
            events += self._close()
            self._index, self._open = self._index + 1, type(piece)
            events.append(self._block("content_block_start", {"content_block": _empty(piece)}))
        if isinstance(piece, Reasoning):
            delta = {"type": "thinking_delta", "thinking": piece.text}
        elif isinstance(piece, Content):
            delta = {"type": "text_delta", "text": piece.text}
        else:
            arguments = piece.arguments if load_object(piece.arguments) is not None else "{}"
            delta = {"type": "input_json_delta", "partial_json": arguments}
        return [*events, self._block("content_block_delta", {"delta": delta})]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        events = [self._block("content_block_stop", {})]
        if self._open is Reasoning:
            events.insert(
                0, self._block("content_block_delta", {"delta": {"type": "signature_delta", "signature": ""}})
            )
        self._open = None
        return events

    def _block(self, kind: str, data: JSON) -> bytes:
        return _event(kind, {"index": self._index} | data)

    def end(self, answer: Answer) -> list[bytes]:
        return [
            *self._close(),
            _event("message_delta", {"delta": _stop(answer), "usage": _usage(answer)}),
            _event("message_stop", {}),
        ]

    def error(self, error: SlimeError, status: int) -> list[bytes]:
        return [event(self._protocol.error(error, status), "error")]


def _event(kind: str, data: JSON) -> bytes:
    return event({"type": kind} | data, kind)


def _head(model: str) -> JSON:
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}


def _empty(piece: Piece) -> JSON:
    if isinstance(piece, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    if isinstance(piece, Content):
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}


def _stop(answer: Answer) -> JSON:
    if answer.matched is not None and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.matched}
    return {"stop_reason": STOP_REASONS.get(answer.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(answer: Answer) -> JSON:
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


def _system(body: JSON) -> list[JSON]:
    text = text_of(body.get("system"), "system")
    return [{"role": "system", "content": text}] if text else []


def _tools(body: JSON) -> list[JSON] | None:
    """Returns tools in OpenAI's form. Raises InvalidField."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice is not None and not (isinstance(choice, dict) and choice.get("type") in ("auto", "none")):
        raise InvalidField("tool_choice", choice, "{'type': 'auto'} or {'type': 'none'}: a call cannot be forced here")
    if tools and not is_neutral((choice or {}).get("disable_parallel_tool_use"), (None, False)):
        raise InvalidField("tool_choice.disable_parallel_tool_use", True, "False: other values are not supported")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise InvalidField("tools", tools, "a list of objects")
    converted = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise InvalidField(f"tools[{i}]", tool, "an object with name and input_schema")
        if tool.get("type") not in (None, "custom"):
            raise InvalidField(
                f"tools[{i}].type", tool["type"], "custom: tools of Anthropic's servers are not supported"
            )
        function = {"name": tool["name"], "parameters": tool.get("input_schema") or {"type": "object"}}
        if tool.get("description"):
            function["description"] = tool["description"]
        converted.append({"type": "function", "function": function})
    return None if (choice or {}).get("type") == "none" else converted


def _messages(messages: Any) -> list[JSON]:
    if not isinstance(messages, list) or not messages:
        raise InvalidField("messages", messages, "a list of objects with role and content")
    converted: list[JSON] = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
            raise InvalidField(f"messages[{i}]", message, "an object with the role user or assistant, and content")
        content = message.get("content")
        if not isinstance(content, list):
            converted.append({"role": message["role"], "content": text_of(content, f"messages[{i}].content")})
        elif message["role"] == "assistant":
            converted.append(_assistant(i, content))
        else:
            converted += _user(i, message["role"], content)
    if not converted:
        raise InvalidField("messages", messages, "at least one block of content")
    if converted[-1]["role"] == "assistant":
        raise InvalidField(
            "messages", "the start of an answer", "a user message at the end: continuing an answer is not supported"
        )
    return converted


def _assistant(position: int, blocks: list[Any]) -> JSON:
    message: JSON = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for j, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        where = f"messages[{position}].content[{j}]"
        if kind == "thinking":
            message["reasoning_content"] += str(block.get("thinking") or "")
        elif kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise InvalidField(f"{where}.name", block.get("name"), "the name of a tool")
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            message["tool_calls"].append({"id": block.get("id"), "type": "function", "function": function})
        else:
            message["content"] += text_of([block], where)
    return message


def _user(position: int, role: str, blocks: list[Any]) -> list[JSON]:
    """Returns the messages of one user turn: each tool result becomes a message of its own, consecutive texts one."""
    messages: list[JSON] = []
    for j, block in enumerate(blocks):
        where = f"messages[{position}].content[{j}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            text = text_of(block.get("content"), f"{where}.content")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            text = text_of([block], where)
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += text
            else:
                messages.append({"role": role, "content": text})
    return messages
