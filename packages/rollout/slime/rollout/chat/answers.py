"""Reads the tokens of an answer as they arrive, and splits their text into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from slime.rollout.chat.pieces import Content, Piece, message_of
from slime.rollout.chat.request import Answer, Generated, ModelRequest
from slime.rollout.chat.syntaxes.registry import AnswerSyntax
from slime.rollout.chat.text import TextStream

# The number of tokens at the end of a prompt in which a mark may open the reasoning.
PROMPT_END = 12


class AnswerReader:
    """Reads an answer as it grows.

    prompt: token ids. stops: texts that end the answer, including those of the request. end_ids: tokens that may end
    it. However the tokens are split into calls of `read`, the pieces together have the same texts and calls.
    """

    def __init__(
        self,
        tokenizer: Any,
        request: ModelRequest,
        prompt: Sequence[int],
        syntax: AnswerSyntax,
        *,
        stops: Sequence[str] = (),
        end_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        skip = request.sampling.get("skip_special_tokens") is not False
        self._hidden: Sequence[str] = ()
        self._parser = None
        if request.messages is not None:
            end = str(tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False))
            self._parser = syntax.parser(request.tools, end)
            if skip and syntax.keeps_special_tokens:
                skip, self._hidden = False, getattr(tokenizer, "all_special_tokens", ())
        end_ids = {*end_ids, *getattr(tokenizer, "all_special_ids", ())}
        self._text = TextStream(tokenizer, skip_special_tokens=skip, stops=stops, end_ids=end_ids)
        self._read = self._log_probs_read = 0
        self._pieces: list[Piece] = []

    def read(self, generated: Generated) -> list[Piece]:
        """Returns the new pieces. generated: all tokens so far."""
        text = self._text.feed(generated.ids[self._read :])
        self._read = len(generated.ids)
        reason = generated.finish_reason
        if reason is not None:
            text += self._text.finish(reason)
        if self._parser is None:
            pieces: list[Piece] = [Content(text)] if text else []
        else:
            pieces = self._parser.feed(text)
            if reason is not None:
                pieces = [*pieces, *self._parser.finish()]
        pieces = [self._without_hidden(piece) for piece in pieces]
        self._pieces += pieces
        return pieces

    def log_probs(self, generated: Generated) -> list[tuple[str, float]]:
        """Returns (text, log-prob) of each token that is new since the last call."""
        first, self._log_probs_read = self._log_probs_read, len(generated.log_probs)
        pairs = zip(generated.ids[first : self._log_probs_read], generated.log_probs[first:], strict=True)
        return [(str(self._tokenizer.decode([token])), float(value)) for token, value in pairs]

    def answer(self, generated: Generated, log_probs: list[tuple[str, float]] | None = None) -> Answer:
        """Returns the whole answer. generated: the one that was read last, with all tokens."""
        reason = generated.finish_reason or {}
        message = message_of(self._pieces)
        kind = str(reason.get("type") or "stop")
        matched = reason.get("matched")
        return Answer(
            message=message,
            finish_reason="tool_calls" if kind == "stop" and message.get("tool_calls") else kind,
            matched=matched if isinstance(matched, str) else None,
            prompt_tokens=generated.prompt_tokens,
            completion_tokens=len(generated.ids),
            cached_tokens=generated.cached_tokens,
            weight_version=generated.weight_version,
            log_probs=log_probs,
        )

    def _without_hidden(self, piece: Piece) -> Piece:
        if self._hidden and isinstance(piece, Content):
            text = piece.text
            for token in self._hidden:
                text = text.replace(token, "")
            return Content(text)
        return piece
