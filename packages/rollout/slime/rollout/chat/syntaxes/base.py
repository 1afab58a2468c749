"""Syntaxes in which models write tool calls and reasoning into their text, and the interface of their parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime.rollout.chat.pieces import Piece, ToolCall

JSON = dict[str, Any]
# From a block of text and the tools' parameter schemas, by tool, to the calls in the block; None where it holds none.
ParseBlock = Callable[[str, Mapping[str, JSON]], Sequence[ToolCall] | None]


class AnswerParser(Protocol):
    """Parses the text of an answer into pieces. The text may arrive in parts of any size; how it is cut does not change
    the texts and calls of all pieces together."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


@dataclass(frozen=True)
class CallSyntax:
    """A syntax in which calls stand in blocks.

    blocks: the start and end mark of each kind of block; the end mark "" stands for the end of the answer. parse: reads
    the calls in a block. special: the marks are special tokens, which decoding must keep. bare: an answer that consists
    of JSON objects without marks may be a call too.
    """

    blocks: tuple[tuple[str, str], ...]
    parse: ParseBlock
    special: bool = False
    bare: bool = False


@dataclass(frozen=True)
class Thinking:
    """A syntax of reasoning between two marks. begins: every answer begins with reasoning, even if neither the prompt
    nor the answer contains the opening mark. kept: reasoning stays in the content, which begins with the opening mark
    that ended the prompt."""

    open: str = "<think>"
    close: str = "</think>"
    begins: bool = False
    kept: bool = False


def load_object(text: str) -> JSON | None:
    """Returns the JSON object in `text`, None if it holds anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def typed(text: str, schema: Any) -> Any:
    """Returns the value of an argument that was written without quotes.

    schema: the parameter's. A value is a string if the schema's type is string, or if it is not valid JSON.
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def schemas_of(tools: Sequence[Any] | None) -> dict[str, JSON]:
    """Returns the schemas of each tool's parameters, by the tool's name. tools: in OpenAI's form."""
    schemas: dict[str, JSON] = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schemas[function["name"]] = properties if isinstance(properties, dict) else {}
    return schemas
