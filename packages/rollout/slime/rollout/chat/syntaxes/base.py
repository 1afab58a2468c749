"""Syntaxes of tool calls and reasoning: how a model writes them into its text, and parsers of such text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime.rollout.chat.pieces import Piece, ToolCall

JSON = dict[str, Any]
# Returns the calls in a block of text, None where it holds none. schemas: parameters of the tools, by their names.
ParseBlock = Callable[[str, Mapping[str, JSON]], Sequence[ToolCall] | None]


class AnswerParser(Protocol):
    """Parses the text of an answer into pieces. Text arrives in parts of any size; where they are cut changes nothing
    in the sum of the pieces."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


@dataclass(frozen=True)
class CallSyntax:
    """Calls stand in blocks. blocks: start and end of each kind; an end of "" is the end of the answer.

    special: the marks are special tokens, which the text must keep. bare: an answer that is one JSON object may be a
    call as well.
    """

    blocks: tuple[tuple[str, str], ...]
    parse: ParseBlock
    special: bool = False
    bare: bool = False


@dataclass(frozen=True)
class Thinking:
    """A syntax of reasoning. begins: every answer begins with reasoning, also where neither the prompt nor the answer
    opens it."""

    open: str = "<think>"
    close: str = "</think>"
    begins: bool = False


def load_object(text: str) -> JSON | None:
    """Parses `text` as a JSON object; None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def typed(text: str, schema: Any) -> Any:
    """Reads the value of an argument that was written without quotes.

    schema: of the parameter; without a type, anything but JSON is a string.
    """
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def schemas_of(tools: Sequence[Any] | None) -> dict[str, JSON]:
    """Returns properties of the parameters of tools in OpenAI's form, by the name of the tool."""
    found: dict[str, JSON] = {}
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[function["name"]] = properties if isinstance(properties, dict) else {}
    return found
