"""OpenAI's responses protocol. Nothing is stored: each request must hold the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from slime.rollout.chat.fields import (
    Neutral,
    check_body,
    check_names,
    common_fields,
    is_neutral,
    text_of,
)
from slime.rollout.chat.messages import clean
from slime.rollout.chat.pieces import JSON, Content, Piece, Reasoning, ToolCall
from slime.rollout.chat.protocols.base import Events, LogProbs, event, new_id
from slime.rollout.chat.protocols.openai_chat import error_body, offered
from slime.rollout.chat.request import Answer, ModelRequest
from slime.types.errors import InvalidField, SlimeError

SAMPLING = {"temperature": "temperature", "top_p": "top_p"}
KNOWN = SAMPLING.keys() | {
    "chat_template_kwargs", "input", "instructions", "max_output_tokens", "stream", "text", "tool_choice", "tools",
}  # fmt: skip
WITHOUT_EFFECT = frozenset((
    "metadata", "model", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "store", "stream_options", "user",
))  # fmt: skip
NEUTRAL: Neutral = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "include": (None, []),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "parallel_tool_calls": (None, True),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "service_tier": (None, "auto", "default"),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
WITHOUT_TOOLS = NEUTRAL | {"parallel_tool_calls": (None, False, True)}
TEXT_KINDS = ("text", "input_text", "output_text")


class Responses:
    path = "/v1/responses"

    def read(self, body: Any) -> ModelRequest:
        body = check_body(body)
        check_names(body, KNOWN, WITHOUT_EFFECT, NEUTRAL if body.get("tools") else WITHOUT_TOOLS)
        _check_text(body.get("text"))
        instructions = text_of(body.get("instructions"), "instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        return ModelRequest(
            messages=clean([*system, *_messages(body.get("input"))]),
            tools=offered(_tools(body.get("tools")), body.get("tool_choice")),
            **common_fields(body, SAMPLING, limit="max_output_tokens"),
        )

    def whole(self, request: ModelRequest, answers: Sequence[Answer], model: str) -> JSON:
        (answer,) = answers
        message = answer.message
        output: list[JSON] = []
        status = _status(answer)
        if message.get("reasoning_content"):
            output.append(_item(Reasoning, new_id("rs_"), message["reasoning_content"], status=status))
        if message["content"] or not output and not message.get("tool_calls"):
            output.append(_item(Content, new_id("msg_"), message["content"] or "", status=status))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            output.append(
                _call_item(new_id("fc_"), ToolCall(function["name"], function["arguments"], call["id"]), status)
            )
        return finished(_head(request, model), answer, output)

    def events(self, request: ModelRequest, model: str) -> Events:
        return _Events(request, model)

    def error(self, error: SlimeError, status: int) -> JSON:
        return error_body(error, status)


class _Events:
    """Events of an answer: consecutive pieces of one kind form one output item."""

    def __init__(self, request: ModelRequest, model: str) -> None:
        self._head = _head(request, model)
        self._number = -1
        self._output: list[JSON] = []
        self._open: type[Piece] | None = None
        self._id = self._text = ""

    def begin(self, prompt_tokens: int) -> list[bytes]:
        return [self._event(kind, response=self._head) for kind in ("response.created", "response.in_progress")]

    def pieces(self, pieces: Sequence[Piece], log_probs: LogProbs | None) -> list[bytes]:
        return [each for piece in pieces for each in self._piece_events(piece)]

    def _piece_events(self, piece: Piece) -> list[bytes]:
        if isinstance(piece, ToolCall):
            return [*self._close("completed"), *self._call_events(piece)]
        events: list[bytes] = []
        if self._open is not type(piece):
            events += [*self._close("completed"), *self._start(type(piece))]
        self._text += piece.text
        kind = "response.reasoning_text.delta" if isinstance(piece, Reasoning) else "response.output_text.delta"
        more: JSON = {} if isinstance(piece, Reasoning) else {"logprobs": []}
        return [*events, self._event(kind, **self._place(), content_index=0, delta=piece.text, **more)]

    def _start(self, kind: type[Piece]) -> list[bytes]:
        self._open, self._text = kind, ""
        self._id = new_id("rs_" if kind is Reasoning else "msg_")
        item = _item(kind, self._id, "", status="in_progress")
        part = item["content"][0]
        return [
            self._event("response.output_item.added", output_index=len(self._output), item=item | {"content": []}),
            self._event("response.content_part.added", **self._place(), content_index=0, part=part),
        ]

    def _close(self, status: str) -> list[bytes]:
        if self._open is None:
            return []
        item = _item(self._open, self._id, self._text, status=status)
        kind = "response.reasoning_text.done" if self._open is Reasoning else "response.output_text.done"
        more: JSON = {} if self._open is Reasoning else {"logprobs": []}
        events = [
            self._event(kind, **self._place(), content_index=0, text=self._text, **more),
            self._event("response.content_part.done", **self._place(), content_index=0, part=item["content"][0]),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        self._open = None
        return events

    def _call_events(self, call: ToolCall) -> list[bytes]:
        self._id = new_id("fc_")
        item = _call_item(self._id, call, "completed")
        begun = item | {"arguments": "", "status": "in_progress"}
        place = self._place()
        arguments = "response.function_call_arguments"
        events = [
            self._event("response.output_item.added", output_index=len(self._output), item=begun),
            self._event(f"{arguments}.delta", **place, delta=call.arguments),
            self._event(f"{arguments}.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=len(self._output), item=item),
        ]
        self._output.append(item)
        return events

    def end(self, answer: Answer) -> list[bytes]:
        status = _status(answer)
        events = self._close(status)
        if not self._output:
            events += [*self._start(Content), *self._close(status)]
        whole = finished(self._head, answer, self._output)
        return [*events, self._event(f"response.{status}", response=whole)]

    def error(self, error: SlimeError, status: int) -> list[bytes]:
        failed = {"code": "server_error", "message": str(error)}
        return [
            self._event("error", message=str(error), code=str(status), param=error.field or None),
            self._event("response.failed", response=self._head | {"status": "failed", "error": failed}),
        ]

    def _place(self) -> JSON:
        return {"item_id": self._id, "output_index": len(self._output)}

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number} | data, kind)


def finished(head: JSON, answer: Answer, output: list[JSON]) -> JSON:
    status = _status(answer)
    return head | {
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _head(request: ModelRequest, model: str) -> JSON:
    body = request.body
    return {
        "id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "instructions": body.get("instructions"),
        "max_output_tokens": request.max_tokens, "metadata": body.get("metadata") or {}, "model": model, "output": [],
        "parallel_tool_calls": True, "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
        "store": False, "temperature": body.get("temperature"), "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [],
        "top_p": body.get("top_p"), "truncation": "disabled", "usage": None, "user": body.get("user"),
    }  # fmt: skip


def _item(kind: type[Piece], id: str, text: str, *, status: str) -> JSON:
    if kind is Reasoning:
        content = [{"type": "reasoning_text", "text": text}]
        return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": id, "type": "message", "role": "assistant", "content": [part], "status": status}


def _call_item(id: str, call: ToolCall, status: str) -> JSON:
    return {
        "id": id, "type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments,
        "status": status,
    }  # fmt: skip


def _check_text(text: Any) -> None:
    """Raises InvalidField for an output format other than plain text."""
    if text is None:
        return
    if not isinstance(text, dict):
        raise InvalidField("text", text, "an object")
    if not is_neutral(text.get("format"), (None, {"type": "text"})):
        raise InvalidField("text.format", text["format"], "{'type': 'text'}: other values are not supported")
    for name, value in text.items():
        if name != "format" and value is not None:
            raise InvalidField(f"text.{name}", value, "None: other values are not supported")


def _tools(tools: Any) -> Any:
    """Returns tools in the form of the chat protocol. Raises InvalidField."""
    if not isinstance(tools, list):
        return tools
    converted = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            found = tool.get("type") if isinstance(tool, dict) else tool
            raise InvalidField(f"tools[{i}]", found, "an object with type function, name and parameters")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        converted.append({"type": "function", "function": function})
    return converted


def _messages(items: Any) -> list[JSON]:
    """Returns messages of the chat protocol. Consecutive items of the assistant (reasoning, text, calls) form one."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise InvalidField("input", items, "a text, or a list of items")
    messages: list[JSON] = []
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise InvalidField(f"input[{i}]", item, "an object")
        kind = item.get("type", "message")
        if kind == "function_call_output":
            text = text_of(item.get("output"), f"input[{i}].output", TEXT_KINDS)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind == "message" and item.get("role") != "assistant":
            text = text_of(item.get("content"), f"input[{i}].content", TEXT_KINDS)
            messages.append({"role": item.get("role"), "content": text})
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []})
            _add_to_answer(messages[-1], item, kind, f"input[{i}]")
        else:
            raise InvalidField(f"input[{i}].type", kind, "message, reasoning, function_call or function_call_output")
    return messages


def _add_to_answer(message: JSON, item: JSON, kind: str, where: str) -> None:
    if kind == "message":
        message["content"] += text_of(item.get("content"), f"{where}.content", TEXT_KINDS)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        message["reasoning_content"] += text_of(parts, f"{where}.content", ("reasoning_text", "summary_text"))
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
        message["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})
