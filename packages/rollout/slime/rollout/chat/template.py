"""Renders chat templates, and checks the template arguments that clients may give: those that the template reads.

A template is a program, and the tokenizer's own arguments (padding, max_length, ...) change what it returns, so clients
may choose neither.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from slime.types.errors import InvalidField

# Parameters of `apply_chat_template`, and names that transformers defines in every template.
RESERVED = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "raise_exception", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip


class _Generation(Extension):
    """The tag that transformers adds to templates, to mark what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def template_arguments(tokenizer: Any) -> frozenset[str]:
    """Returns the names that a tokenizer's chat templates read, without the arguments of the tokenizer itself."""
    templates = getattr(tokenizer, "chat_template", None) or ()
    if isinstance(templates, Mapping):
        templates = tuple(templates.values())
    texts = (templates,) if isinstance(templates, str) else tuple(templates)
    return frozenset().union(*map(_arguments, texts))


def syntax_error(template: str) -> str | None:
    """Returns the line and the reason of a chat template's syntax error; None for a template without errors."""
    try:
        _environment().parse(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    return None


def _environment() -> Environment:
    return Environment(extensions=["jinja2.ext.loopcontrols", _Generation])  # noqa: S701 - parsed, never run


@functools.lru_cache(maxsize=32)
def _arguments(template: str) -> frozenset[str]:
    environment = _environment()
    try:
        found = meta.find_undeclared_variables(environment.parse(template))
    except TemplateError:
        # Rendering the template will raise the error.
        return frozenset()
    # Special tokens (bos_token, ...) are the tokenizer's.
    return frozenset(n for n in found - RESERVED - environment.globals.keys() if not n.endswith(("_token", "_tokens")))


def check_arguments(tokenizer: Any, arguments: Any, field: str = "chat_template_kwargs") -> dict[str, Any]:
    """Returns `arguments` as a dict, empty for None. Raises InvalidField for arguments that clients may not give."""
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise InvalidField(field, arguments, "an object")
    if arguments:
        known = template_arguments(tokenizer)
        for name, value in arguments.items():
            if name not in known:
                expected = ", ".join(sorted(known)) or "none"
                raise InvalidField(
                    f"{field}.{name}", value, f"an argument that the model's own chat template reads ({expected})"
                )
    return arguments


def render(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, arguments: Mapping[str, Any]) -> str:
    """Returns the text of a conversation, followed by the start of an answer.

    messages: as returned by `messages.clean`. arguments: the template's, already checked. Raises InvalidField if the
    tokenizer has no template or the template refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidField("messages", "given", "a prompt: the tokenizer of this model has no chat template")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InvalidField("tools", tools, "a list of objects")
    return apply(tokenizer, messages, tools, arguments)


def check_messages(messages: Any) -> None:
    """Raises InvalidField for messages that are not a list of objects, each with a role."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidField("messages", messages, "a list of objects with role and content")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidField(f"messages[{position}]", message, "an object with role and content")


def apply(
    renderer: Any, messages: list[dict[str, Any]], tools: Any, arguments: Mapping[str, Any], *, opens: bool = True
) -> str:
    """Renders messages with a tokenizer or a processor that is known to have a template.

    opens: whether the start of an answer follows. Raises InvalidField for messages that are not objects with a role, or
    that the template refuses.
    """
    check_messages(messages)
    try:
        return str(
            renderer.apply_chat_template(
                messages, **{**arguments, "tools": tools or None}, tokenize=False, add_generation_prompt=opens
            )
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InvalidField("messages", str(error), "messages that the chat template of this model takes") from error


def encode(tokenizer: Any, text: str, field: str) -> list[int]:
    """Returns the token ids of `text`, without adding special tokens. Raises InvalidField naming `field` for text that
    is not valid Unicode."""
    check_text(text, field)
    return list(tokenizer.encode(text, add_special_tokens=False))


def check_text(text: str, field: str) -> None:
    """Raises InvalidField for text that is not valid Unicode: JSON strings can hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(field, str(error), "text") from error
