"""Parts of an answer in the order in which a model writes them: reasoning, content and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

JSON = dict[str, Any]


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class ToolCall:
    """A tool call. arguments: JSON as the model wrote it, which may not fit the tool's schema."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


Piece: TypeAlias = Reasoning | Content | ToolCall


def message_of(pieces: Sequence[Piece]) -> JSON:
    """Returns the assistant's message in the form of OpenAI's chat protocol."""
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls = [
        {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
        for piece in pieces
        if isinstance(piece, ToolCall)
    ]
    message: JSON = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
