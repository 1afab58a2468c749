"""Fields of a request, read and checked alike in every protocol.

What would change the answer and is not supported is refused; a value that asks for nothing is taken, since clients send
such on their own.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from slime.types.errors import InvalidField

Neutral = dict[str, tuple[Any, ...]]


def check_body(body: Any) -> dict[str, Any]:
    """Raises InvalidField."""
    if not isinstance(body, dict):
        raise InvalidField("body", type(body).__name__, "a JSON object")
    return body


def check_names(
    body: Mapping[str, Any], known: Collection[str], without_effect: Collection[str], neutral: Neutral
) -> None:
    """Raises InvalidField for a name that is not `known`, unless its value asks for nothing.

    neutral: by name, the values that ask for nothing.
    """
    for name, value in body.items():
        if name in known or name in without_effect:
            continue
        if name in neutral:
            if not is_neutral(value, neutral[name]):
                raise InvalidField(name, value, f"{neutral[name][-1]!r}: anything else is not offered here")
        else:
            near = difflib.get_close_matches(name[:100], sorted({*known, *neutral}), n=1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}"
            raise InvalidField(name[:100], value, hint, f"unknown parameter {name[:100]!r}; {hint}")


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # False equals 0 and True equals 1, which are other values.
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in neutral)


def whole_number(body: Mapping[str, Any], name: str) -> int | None:
    """Returns the value of a limit; None where there is none. Raises InvalidField."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidField(name, value, "a whole number, at least 1")
    return value


def stop_texts(body: Mapping[str, Any], name: str) -> list[str]:
    """Raises InvalidField."""
    stop = body.get(name)
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise InvalidField(name, stop, "a text or a list of texts, none of them empty")
    return stops


def flag(body: Mapping[str, Any], name: str) -> bool:
    """Raises InvalidField."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidField(name, value, "true or false")
    return bool(value)


def common_fields(body: dict[str, Any], sampling: Mapping[str, str], limit: str) -> dict[str, Any]:
    """Returns arguments of a `ModelRequest` that all protocols read alike. Raises InvalidField.

    sampling: protocol's name -> SGLang's. limit: the field that bounds the tokens of an answer.
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
    """Returns the text of a content: a text, or a list of parts of these kinds. Raises InvalidField."""
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
