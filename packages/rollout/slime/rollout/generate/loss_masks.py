"""Loss masks of conversations: the tokens that supervised fine-tuning trains on.

A conversation is tokenised turn by turn, so that every assistant turn keeps its reasoning where the chat template drops
that of earlier turns. For Qwen3.5 it is rendered at once, and trained on as its template leaves it. Masks are 1 on what
the assistant wrote, its end-of-turn tokens included, and 0 elsewhere; a message with `"step_loss_mask": 0` is not
trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.rollout.chat import template
from slime.rollout.settings.rollout import LOSS_MASK_TYPES
from slime.types.errors import InvalidField, InvalidSetting

__all__ = ["MultiTurnLossMaskGenerator", "get_response_lengths"]

Message = dict[str, Any]
PROBE = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}
DISTILLED = "<｜Assistant｜>"
# Qwen3.5's template has these. The line that opens the reasoning, also where that is empty, belongs to the prompt which
# the model continues.
TURN, END = "<|im_start|>", "<|im_end|>"
ANSWER, OPENED = f"{TURN}assistant\n", "<think>\n"


def get_response_lengths(loss_masks: Sequence[Sequence[int]]) -> list[int]:
    """Returns the number of trained tokens of each mask."""
    return [sum(mask) for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Tokenizes conversations with a chat template and masks the tokens that the assistant did not write.

    tokenizer_type: `qwen` renders each turn alone, `qwen3` behind a user turn (its template needs one), `distill_qwen`
    takes the first message as the prompt and trains on the last. `qwen3_5` renders the conversation at once, as Qwen3.5
    was trained: its template has a place for reasoning in the answers behind the last user turn, and none in earlier
    ones.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        """Raises ValueError for an unknown type; InvalidSetting for one that does not suit the chat template, and for a
        tokenizer that is not fast with `qwen3_5`."""
        if tokenizer_type not in LOSS_MASK_TYPES:
            raise ValueError(f"tokenizer_type must be one of {', '.join(LOSS_MASK_TYPES)}, got {tokenizer_type!r}")
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        if tokenizer_type == "qwen" and DISTILLED in tokenizer.get_added_vocab():
            self.tokenizer_type = "distill_qwen"
        if tokenizer_type == "qwen3_5":
            if not tokenizer.is_fast:
                raise InvalidSetting.requires(
                    "--loss-mask-type qwen3_5",
                    "a fast tokenizer (tokenizer.json)",
                    "others do not tell where tokens lie",
                )
            return
        try:
            once, twice = self._render([PROBE]), self._render([PROBE, PROBE])
        except InvalidField as error:
            raise InvalidSetting.must_be(
                "--loss-mask-type", "a way to render conversations that suits the model's chat template",
                got=tokenizer_type, reason=f"it renders user turns in a row, and the template says: {error.value}",
            ) from error  # fmt: skip
        # Two user turns have one turn more than one; the rest of `once` is the default system message.
        self.system_message_length = 2 * len(once) - len(twice)
        self.gen_token_length = len(self._render([PROBE], opens=True)) - len(once)

    def get_loss_mask(self, messages: list[Message], tools: list[Any] | None = None) -> tuple[list[int], list[int]]:
        """Returns (token ids, mask), of equal length.

        Raises InvalidField for messages that are not objects with a role, that the chat template refuses, with another
        step_loss_mask than 0 or 1, or with text that looks like a turn.
        """
        template.check_messages(messages)
        trained = [_is_trained(message, position) for position, message in enumerate(messages)]
        if self.tokenizer_type == "qwen3_5":
            return self._at_once(messages, trained, tools)
        if self.tokenizer_type == "distill_qwen":
            prompt, answer = self._render(messages[:1], tools, opens=True), messages[-1].get("content")
            if not isinstance(answer, str):
                raise InvalidField(f"messages[{len(messages) - 1}].content", answer, "text")
            response = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
            return [*prompt, *response], [0] * len(prompt) + [int(trained[-1])] * len(response)
        ids: list[int] = []
        mask: list[int] = []
        for position, message in enumerate(messages):
            turn = self._turn(message, position, tools)
            ids += turn
            written = len(turn) - self.gen_token_length if message["role"] == "assistant" else 0
            mask += [0] * (len(turn) - written) + [int(trained[position])] * written
        return ids, mask

    def _at_once(
        self, messages: list[Message], trained: list[bool], tools: list[Any] | None
    ) -> tuple[list[int], list[int]]:
        for message in messages:
            if any(mark in text for text in _texts(message) for mark in (TURN, END)):
                raise InvalidField("messages", message, f"messages without {TURN} and {END}, which delimit turns")
        text = self._text(messages, tools)
        answers = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
        if text.count(ANSWER) != len(answers) or text.count(TURN) != text.count(END):
            expected = f"a template that writes {TURN}ROLE and {END} once per turn"
            raise InvalidField("messages", text, expected)
        marks, start = bytearray(len(text)), 0
        for position in answers:
            start = text.index(ANSWER, start) + len(ANSWER)
            end = text.index(END, start) + len(END)
            end += text.startswith("\n", end)
            first = start + len(OPENED) if text.startswith(OPENED, start) else start
            marks[first:end] = bytes([trained[position]]) * (end - first)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # A token that has some of it, such as a line break before and one behind, is trained on.
        return list(encoded["input_ids"]), [int(any(marks[a:b])) for a, b in encoded["offset_mapping"]]

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Returns the text of each run of trained tokens."""
        runs = itertools.groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1] == 1)
        return [self.tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]

    def _turn(self, message: Message, position: int, tools: list[Any] | None) -> list[int]:
        """Returns the tokens that a message adds; only the first message keeps the default system message."""
        if self.tokenizer_type == "qwen3":
            before = self._render([PROBE], tools)
            turn = self._render([PROBE, message], tools)[len(before) :]
            if position == 0 and message["role"] != "system":
                turn = before[: self.system_message_length] + turn
            return turn
        turn = self._render([message], tools)
        return turn[self.system_message_length :] if position and message["role"] != "system" else turn

    def _render(self, messages: list[Message], tools: list[Any] | None = None, *, opens: bool = False) -> list[int]:
        return list(self.tokenizer(self._text(messages, tools, opens=opens), add_special_tokens=False)["input_ids"])

    def _text(self, messages: list[Message], tools: list[Any] | None, *, opens: bool = False) -> str:
        return template.apply(self.tokenizer, messages, tools, {}, opens=opens)


def _texts(value: Any) -> Iterator[str]:
    """Yields every text in a message, such as its content, its reasoning and the arguments of its calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, Sequence)) and not isinstance(value, (bytes, bytearray)):
        for each in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _is_trained(message: Message, position: int) -> bool:
    value = message.get("step_loss_mask")
    # Rows of a Parquet file have None where other messages of the column have a value.
    if value is None:
        return True
    if not isinstance(value, (int, float)) or value not in (0, 1):
        raise InvalidField(f"messages[{position}].step_loss_mask", value, "0 or 1 (a number, or true or false)")
    return bool(value)
