"""Reads and checks fields of requests in the same way for every protocol.

An unsupported field that would change the answer is refused. It is accepted with a value that asks for nothing, because
clients send such values by default.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from slime.types.errors import InvalidField

Neutral = dict[str, tuple[Any, ...]]


def check_body(body: Any) -> dict[str, Any]:
    """Returns `body`. Raises InvalidField if it is not a JSON object."""
    if not isinstance(body, dict):
        raise InvalidField("body", type(body).__name__, "a JSON object")
    return body


def check_names(
    body: Mapping[str, Any], known: Collection[str], without_effect: Collection[str], neutral: Neutral
) -> None:
    """Raises InvalidField for a field that is neither `known` nor `without_effect`, unless its value asks for nothing.

    neutral: the values that ask for nothing, by the name of the field.
    """
    for name, value in body.items():
        if name in known or name in without_effect:
            continue
        if name in neutral:
            if not is_neutral(value, neutral[name]):
                raise InvalidField(name, value, f"{neutral[name][-1]!r}: other values are not supported")
        else:
            near = difflib.get_close_matches(name[:100], sorted({*known, *neutral}), n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}"
            raise InvalidField(name[:100], value, hint, f"unknown parameter {name[:100]!r}; {hint}")


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # In Python False == 0 and True == 1, but in JSON they are different values.
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in neutral)


def whole_number(body: Mapping[str, Any], name: str) -> int | None:
    """Returns a positive integer field, None where it is missing. Raises InvalidField for another value."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidField(name, value, "a whole number, at least 1")
    return value


def stop_texts(body: Mapping[str, Any], name: str) -> list[str]:
    """Returns the texts that end an answer. Raises InvalidField unless they are texts, none of them empty."""
    stop = body.get(name)
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise InvalidField(name, stop, "a text or a list of texts, none of them empty")
    return stops


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Returns a boolean field, False where it is missing. Raises InvalidField for another value."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidField(name, value, "true or false")
    return bool(value)


def common_fields(body: dict[str, Any], sampling: Mapping[str, str], limit: str) -> dict[str, Any]:
    """Returns the arguments of a `ModelRequest` that all protocols read in the same way. Raises InvalidField.

    sampling: SGLang's name of each sampling parameter, by the protocol's. limit: the field that bounds the tokens of an
    answer.
    """
    return {
        "template_arguments": body.get("chat_template_kwargs"),
        "max_tokens": whole_number(body, limit),
        "sampling": {ours: body[name] for name, ours in sampling.items() if body.get(name) is not None},
        "stream": flag(body, "stream"),
        "model": body["model"] if isinstance(body.get("model"), str) else "",
        "body": body,
    }


def text_of(content: Any, field: str, kinds: Collection[str] = ("text",)) -> str:
    """Returns the text of a message's content: a text, or a list of parts of these kinds. Raises InvalidField."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") not in kinds or not isinstance(part.get("text"), str):
            found = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts]
            raise InvalidField(
                field, found, "a text, or a list of parts that are text; only /generate takes images, as image_data"
            )
    return "".join(part["text"] for part in parts)
