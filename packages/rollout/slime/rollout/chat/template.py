"""Arguments that a client may give to the model's chat template: those that the template itself reads.

A template is a program, and a tokenizer's own arguments (padding, max_length, ...) change what it returns: neither is a
client's to choose.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from slime.types.errors import InvalidField

# Parameters of `apply_chat_template`, and names that transformers puts into a template itself.
RESERVED = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "raise_exception", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "strftime_now", "tokenize", "tokenizer_kwargs", "tools", "truncation",
))  # fmt: skip


class _Generation(Extension):
    """The tag of transformers around what the assistant says."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def template_arguments(tokenizer: Any) -> frozenset[str]:
    """Returns names that the chat templates of a tokenizer read and that are no arguments of the tokenizer."""
    templates = getattr(tokenizer, "chat_template", None) or ()
    if isinstance(templates, Mapping):
        templates = tuple(templates.values())
    texts = (templates,) if isinstance(templates, str) else tuple(templates)
    return frozenset().union(*map(_arguments, texts))


def syntax_error(template: str) -> str | None:
    """Returns the line of a chat template that cannot be read, and the reason; None for a template that can."""
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
        # The error for it comes from rendering.
        return frozenset()
    # Special tokens (bos_token, ...) are the tokenizer's.
    return frozenset(n for n in found - RESERVED - environment.globals.keys() if not n.endswith(("_token", "_tokens")))


def check_arguments(tokenizer: Any, arguments: Any, field: str = "chat_template_kwargs") -> dict[str, Any]:
    """Returns `arguments` as a dict, empty for None. Raises InvalidField naming the argument that is not a client's to
    give."""
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
    """Renders a conversation with the start of an answer behind it. messages: as `chat_messages.clean` gives them.

    arguments: of the template, trusted. Raises InvalidField where the template does not take them.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidField("messages", "given", "a prompt: the tokenizer of this model has no chat template")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InvalidField("tools", tools, "a list of objects")
    return apply(tokenizer, messages, tools, arguments)


def apply(renderer: Any, messages: list[dict[str, Any]], tools: Any, arguments: Mapping[str, Any]) -> str:
    """Renders with a tokenizer or a processor that is known to have a template.

    Raises InvalidField for messages that its template does not take.
    """
    try:
        return str(
            renderer.apply_chat_template(
                messages, **{**arguments, "tools": tools or None}, tokenize=False, add_generation_prompt=True
            )
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InvalidField("messages", str(error), "messages that the chat template of this model takes") from error


def encode(tokenizer: Any, text: str, field: str) -> list[int]:
    """Returns token ids, none of them special that `text` does not name. Raises InvalidField naming `field` for what is
    no text: JSON can hold half a character."""
    check_text(text, field)
    return list(tokenizer.encode(text, add_special_tokens=False))


def check_text(text: str, field: str) -> None:
    """Raises InvalidField for a text that is not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(field, str(error), "text") from error
