"""Converts messages of OpenAI's protocol to the form that chat templates read, for the engine and the gateway."""

from __future__ import annotations

import json
from typing import Any

from slime.rollout.chat.fields import text_of
from slime.types.errors import InvalidField

JSON = dict[str, Any]


def clean(messages: Any) -> list[JSON]:
    """Returns OpenAI's messages in the form that chat templates read: content as text, arguments of calls as objects.

    Arguments that are not JSON stay text. Raises InvalidField for messages that are not OpenAI's.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidField("messages", messages, "a list of objects with role and content")
    return [_clean(i, message) for i, message in enumerate(messages)]


def _clean(position: int, message: Any) -> JSON:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidField(f"messages[{position}]", message, "an object with role and content")
    if message.get("function_call"):
        raise InvalidField(
            f"messages[{position}].function_call", message["function_call"], "none; use tool_calls instead"
        )
    # Chat templates do not know the role "developer", OpenAI's newer name for "system".
    role = "system" if message["role"] == "developer" else message["role"]
    cleaned: JSON = {"role": role, "content": text_of(message.get("content"), f"messages[{position}].content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value:
            if not isinstance(value, str):
                raise InvalidField(f"messages[{position}].{name}", value, "a text")
            cleaned[name] = value
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(
            isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
        ):
            raise InvalidField(f"messages[{position}].tool_calls", calls, "a list of objects with function")
        cleaned["tool_calls"] = [
            c | {"function": c["function"] | {"arguments": _arguments(c["function"])}} for c in calls
        ]
    return cleaned


def _arguments(function: JSON) -> Any:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
