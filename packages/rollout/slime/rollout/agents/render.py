"""Renders messages to token ids with the chat template of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from slime.rollout.agents.sessions import JSON, Turn
from slime.rollout.chat.template import encode, render
from slime.types.errors import InvalidSetting

# Stands for an assistant's message where the text that follows one is looked for; no template changes letters.
MARK = "zqxanswerzqx"
# New messages and arguments of the template -> the text behind an answer; None where the template shows none.
Following: TypeAlias = Callable[[list[JSON], Mapping[str, Any]], str | None]


class Renderer:
    """Renders conversations to token ids. cumulative: a prompt that continues an earlier turn is that turn's tokens,
    and its new messages rendered.

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
        self._following: Following = _chatml if family == "qwen" else self._behind_an_answer
        if cumulative and family == "qwen" and len(self._encode("<|im_start|>")) != 1:
            raise InvalidSetting.requires(
                "renderer_family qwen", "a tokenizer with the token <|im_start|>", "use auto for this model"
            )

    def prompt(self, messages: list[JSON], tools: Any, turns: Sequence[Turn], extra: Mapping[str, Any]) -> list[int]:
        """Returns token ids of a conversation with the start of an answer behind it. extra: arguments of the template.

        messages: as `clean` gives them. Raises InvalidField where the template does not take them.
        """
        if self.cumulative:
            # The longest that it continues, of several the latest.
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
            # An answer that ended by itself includes its end token.
            end = self.tokenizer.decode([turn.completion_ids[-1]], skip_special_tokens=False)
            text = text.removeprefix(end)
        return [*turn.all_ids, *self._encode(text)]

    def _behind_an_answer(self, new: list[JSON], extra: Mapping[str, Any]) -> str | None:
        """Returns the text that the template writes behind an answer; None where it does not show one with messages
        behind it."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}, *new]
        _, mark, following = self._render(messages, None, extra).rpartition(MARK)
        return following if mark else None

    def _render(self, messages: list[JSON], tools: Any, extra: Mapping[str, Any]) -> str:
        return render(self.tokenizer, messages, tools, {**self.template_kwargs, **extra})

    def _encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text, "messages")


def same_messages(known: Sequence[JSON], messages: Sequence[JSON]) -> bool:
    """Compares two conversations that went through `clean`; reasoning counts only where both have it."""
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
            # Responses to calls that were made together are one turn of the user.
            text += (
                "" if in_responses else "<|im_start|>user"
            ) + f"\n<tool_response>\n{message['content']}\n</tool_response>"
        else:
            text += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
        in_responses = is_response
    return text + ("<|im_end|>\n" if in_responses else "") + "<|im_start|>assistant\n"
