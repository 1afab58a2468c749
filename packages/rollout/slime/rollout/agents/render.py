"""Messages to token ids, by the chat template of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from slime.rollout.agents.sessions import JSON, Turn
from slime.types.errors import InvalidField, InvalidSetting

# Stands for an assistant's message where the text that follows one is looked for; no template changes letters.
MARK = "zqxanswerzqx"


class Renderer:
    """cumulative: a prompt that continues an earlier turn is that turn's tokens, and its new messages rendered.

    family: how new messages are rendered: "auto" takes what the template puts behind an assistant's message, "qwen"
    writes ChatML. Raises InvalidSetting for a tokenizer that does not fit it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        cumulative: bool = False,
        family: str = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.cumulative = cumulative
        self._following: Callable[[list[JSON]], str] = _chatml if family == "qwen" else self._behind_an_answer
        if cumulative and family == "qwen" and len(self._encode("<|im_start|>")) != 1:
            raise InvalidSetting(
                "renderer_family qwen: the tokenizer has no token <|im_start|>; expected auto for this model",
                field="renderer_family", value=family, expected="auto",
            )  # fmt: skip

    def prompt(self, messages: list[JSON], tools: Any, turns: Sequence[Turn], extra: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation with the start of an answer behind it. extra: arguments of the template.

        messages: as `clean` gives them. Raises InvalidField where the template does not take them.
        """
        if self.cumulative:
            for turn in reversed(turns):
                known = len(turn.messages)
                if 0 < known < len(messages) and same_messages(turn.messages, messages[:known]):
                    return self._continued(turn, messages[known:])
        return self._encode(self._render(messages, tools, extra))

    def _continued(self, turn: Turn, new: list[JSON]) -> list[int]:
        text = self._following(new)
        if turn.completion_ids and turn.finish_reason == "stop":
            # An answer that ended by itself has its end already.
            end = self.tokenizer.decode([turn.completion_ids[-1]], skip_special_tokens=False)
            text = text.removeprefix(end)
        return [*turn.all_ids, *self._encode(text)]

    def _behind_an_answer(self, new: list[JSON]) -> str:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *new]
        return self._render(messages, None, {}).rpartition(MARK)[2]

    def _render(self, messages: list[JSON], tools: Any, extra: Mapping[str, Any]) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise InvalidField("messages", "given", "a prompt: the tokenizer of this model has no chat template")
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages,
                    **{**self.template_kwargs, **extra, "tools": tools or None},
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidField("messages", str(error), "messages that the chat template of this model takes") from error

    def encode(self, text: str, field: str) -> list[int]:
        """Raises InvalidField naming `field` for what is no text: JSON can hold half a character."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidField(field, str(error), "text") from error
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _encode(self, text: str) -> list[int]:
        return self.encode(text, "messages")


def clean(messages: Any) -> list[JSON]:
    """OpenAI's messages as templates take them: content as text, arguments of tool calls as objects.

    Raises InvalidField.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidField("messages", messages, "a list of objects with role and content")
    return [_clean(i, message) for i, message in enumerate(messages)]


def _clean(position: int, message: Any) -> JSON:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidField(f"messages[{position}]", message, "an object with role and content")
    cleaned: JSON = {"role": message["role"], "content": _text(position, message.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name):
            cleaned[name] = message[name]
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


def _text(position: int, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise InvalidField(f"messages[{position}].content", content, "a text, or a list of parts that are text")
    return "".join(part["text"] for part in parts)


def _arguments(function: JSON) -> Any:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def same_messages(known: Sequence[JSON], given: Sequence[JSON]) -> bool:
    """Whether two conversations, as `clean` gives them, say the same. Reasoning counts where both have it."""
    return len(known) == len(given) and all(_key(a) == _key(b) for a, b in zip(known, given, strict=True))


def _key(message: JSON) -> tuple[Any, ...]:
    calls = [(c["function"].get("name"), c["function"].get("arguments")) for c in message.get("tool_calls", ())]
    return message["role"], message["content"], calls, message.get("tool_call_id")


def _chatml(new: list[JSON]) -> str:
    text, in_responses = "<|im_end|>\n", False
    for message in new:
        is_response = message["role"] == "tool"
        if in_responses and not is_response:
            text += "<|im_end|>\n"
        if is_response:
            # Responses to calls that were made together are one turn of the user.
            text += (
                "" if in_responses else "<|im_start|>user"
            ) + f"\n<tool_response>\n{message['content']}\n</tool_response>"
        else:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        in_responses = is_response
    return text + ("<|im_end|>\n" if in_responses else "") + "<|im_start|>assistant\n"
