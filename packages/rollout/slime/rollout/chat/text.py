"""Decodes the tokens of an answer as they arrive, into text that no later token changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

# The most bytes of a character in UTF-8, and so the most tokens over which a character can spread.
MOST_BYTES = 4


class TextStream:
    """Decodes tokens to text as they arrive. The cost per token does not grow with the length of the answer.

    skip_special_tokens: leaves them out of the text. stops: texts that end the answer; what may be the start of such a
    text is held back until later tokens decide. end_ids: tokens that may end the answer, held back in the same way.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        stops: Sequence[str] = (),
        end_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = tuple(stops)
        self._ends = frozenset(end_ids)
        self._ids: list[int] = []
        # The tokens that were decoded last are decoded again with the next ones, because some tokenizers join them.
        self._window = self._decoded = 0
        self._held = ""

    def feed(self, ids: Sequence[int]) -> str:
        """Returns the text that is final after these new tokens."""
        self._ids.extend(ids)
        end = len(self._ids)
        while end > self._decoded and self._ids[end - 1] in self._ends:
            end -= 1
        self._decode(end, final=False)
        settled = _settled(self._held, self._stops)
        text, self._held = self._held[:settled], self._held[settled:]
        return text

    def finish(self, reason: Mapping[str, Any]) -> str:
        """Returns the rest of the text, without the token or text that ended the answer. reason: in SGLang's form."""
        matched = reason.get("matched")
        last = self._ids[-1] if len(self._ids) > self._decoded else None
        # An engine may leave out which token ended the answer.
        ended = reason.get("type") == "stop" and matched is None and last in self._ends
        if last is not None and (last == matched or ended):
            self._ids.pop()
        self._decode(len(self._ids), final=True)
        text, self._held = self._held, ""
        return text[: text.index(matched)] if isinstance(matched, str) and matched in text else text

    def _decode(self, end: int, *, final: bool) -> None:
        if end <= self._decoded:
            return
        known, grown = self._text(self._window, self._decoded), self._text(self._window, end)
        if not final and grown.endswith("\ufffd"):
            # The last tokens may be the first bytes of a character: decode up to MOST_BYTES tokens before the end.
            whole, end = end, end - MOST_BYTES
            if end <= self._decoded:
                return
            settled = self._text(self._window, end)
            if not settled.startswith(known) or grown != settled + self._text(end, whole):
                # The cut splits a character.
                return
            grown = settled
        self._held += grown[len(known) :]
        self._window, self._decoded = self._decoded, end

    def _text(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        options = {"skip_special_tokens": self._skip, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **options)) if ids else ""


def _settled(text: str, stops: Sequence[str]) -> int:
    """Returns the length of `text` before anything that is a stop text, or may become one with later text."""
    whole = [text.index(stop) for stop in stops if stop in text]
    starts = [len(text) - n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return min([*whole, *starts], default=len(text))
