"""Renders messages to token ids with the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from slime.rollout.agents.sessions import JSON, Turn
from slime.rollout.chat.template import encode, render
from slime.types.errors import InvalidSetting

# A placeholder for an assistant's message, to find the text that follows one; no template alters plain letters.
MARK = "zqxanswerzqx"
# From new messages and template arguments to the text that follows an answer; None where the template leaves it out.
Following: TypeAlias = Callable[[list[JSON], Mapping[str, Any]], str | None]


class Renderer:
    """Renders conversations to token ids.

    cumulative: a prompt that continues an earlier turn consists of that turn's tokens and the rendered new messages.
    family: how new messages are rendered: "auto" takes the text that the template writes after an assistant's message,
    "qwen" writes ChatML. Raises InvalidSetting for a tokenizer that does not fit the family.
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
        self._following: Following = _chatml if family == "qwen" else self._text_after_answer
        if cumulative and family == "qwen" and len(self._encode("<|im_start|>")) != 1:
            raise InvalidSetting.requires(
                "renderer_family qwen", "a tokenizer with the token <|im_start|>", "use auto for this model"
            )

    def prompt(self, messages: list[JSON], tools: Any, turns: Sequence[Turn], extra: Mapping[str, Any]) -> list[int]:
        """Returns the token ids of a conversation, followed by the start of an answer.

        messages: as returned by `clean`. turns: earlier turns of the session. extra: arguments of the template. Raises
        InvalidField if the template refuses the messages.
        """
        if self.cumulative:
            # The longest turn first, and the latest of equally long ones.
            for turn in sorted(reversed(turns), key=lambda turn: -len(turn.messages)):
                known = len(turn.messages)
                # Other tools, or other arguments, change the beginning of the prompt.
                same = (turn.tools or None, turn.arguments) == (tools or None, extra)
                if same and 0 < known < len(messages) and same_messages(turn.messages, messages[:known]):
                    continued = self._continued(turn, messages[known:], extra)
                    if continued is not None:
                        return continued
        return self._encode(self._render(messages, tools, extra))

    def _continued(self, turn: Turn, new: list[JSON], extra: Mapping[str, Any]) -> list[int] | None:
        text = self._following(new, extra)
        if text is None:
            return None
        if turn.completion_ids and turn.finish_reason == "stop":
            # An answer that ended by itself already includes its end token.
            end = self.tokenizer.decode([turn.completion_ids[-1]], skip_special_tokens=False)
            text = text.removeprefix(end)
        return [*turn.all_ids, *self._encode(text)]

    def _text_after_answer(self, new: list[JSON], extra: Mapping[str, Any]) -> str | None:
        """Returns the text that the template writes after an answer; None if it leaves out answers that other messages
        follow."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *new]
        _, mark, following = self._render(messages, None, extra).rpartition(MARK)
        return following if mark else None

    def _render(self, messages: list[JSON], tools: Any, extra: Mapping[str, Any]) -> str:
        return render(self.tokenizer, messages, tools, {**self.template_kwargs, **extra})

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, "messages")


def same_messages(known: Sequence[JSON], messages: Sequence[JSON]) -> bool:
    """Returns whether two conversations, as returned by `clean`, are equal; compares reasoning only if both have it."""
    return len(known) == len(messages) and all(_same(a, b) for a, b in zip(known, messages, strict=True))


def _same(a: JSON, b: JSON) -> bool:
    reasoning = a.get("reasoning_content"), b.get("reasoning_content")
    return _key(a) == _key(b) and (not all(reasoning) or reasoning[0] == reasoning[1])


def _key(message: JSON) -> tuple[Any, ...]:
    calls = [(c["function"].get("name"), c["function"].get("arguments")) for c in message.get("tool_calls", ())]
    return message["role"], message["content"], calls, message.get("tool_call_id")


def _chatml(new: list[JSON], extra: Mapping[str, Any]) -> str:
    text, in_responses = "<|im_end|>\n", False
    for message in new:
        is_response = message["role"] == "tool"
        if in_responses and not is_response:
            text += "<|im_end|>\n"
        if is_response:
            # Responses to calls of one answer are written as one message of the user.
            text += (
                "" if in_responses else "<|im_start|>user"
            ) + f"\n<tool_response>\n{message['content']}\n</tool_response>"
        else:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        in_responses = is_response
    return text + ("<|im_end|>\n" if in_responses else "") + "<|im_start|>assistant\n"
