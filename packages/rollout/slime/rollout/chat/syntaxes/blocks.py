"""Parser of answers in which marks enclose reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.rollout.chat.pieces import Content, Piece, Reasoning, ToolCall
from slime.rollout.chat.syntaxes.base import CallSyntax, Thinking


class BlockParser:
    """Parses answers with blocks between marks.

    calls, thinking: None where the answer can have none; such text is content. opened: whether the prompt ends with the
    mark that opens reasoning. schemas: see `schemas_of`. A block that holds no call stays content; white space before
    and after calls is dropped.
    """

    def __init__(
        self, calls: CallSyntax | None, thinking: Thinking | None, *, opened: bool, schemas: Mapping[str, Any]
    ) -> None:
        self._calls = calls
        self._text = thinking.open if thinking is not None and thinking.kept else ""
        thinking = None if self._text else thinking
        self._thinking = thinking
        self._schemas = schemas
        self._pieces: list[Piece] = []
        self._opened = thinking is not None and (opened or thinking.begins)
        self._step = self._begin if thinking else self._content
        self._block = ("", "")
        # White space that is dropped if a call follows it.
        self._gap = ""
        self._strip = ""
        self._said = self._called = self._final = False

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._run()

    def finish(self) -> list[Piece]:
        self._final = True
        return self._run()

    def _run(self) -> list[Piece]:
        # Each step returns whether the next one can run before more text arrives.
        while self._step():
            pass
        if self._final and self._gap and not self._called:
            self._pieces.append(Content(self._gap))
            self._gap = ""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _begin(self) -> bool:
        """Looks for the mark that opens the reasoning."""
        assert self._thinking is not None
        opening, text = self._thinking.open, self._text.lstrip()
        if not self._final and len(text) < len(opening) and opening.startswith(text):
            return False
        if text.startswith(opening):
            self._text, self._step = text.removeprefix(opening), self._trim
        else:
            self._step = self._trim if self._opened else self._content
        return True

    def _trim(self) -> bool:
        self._text = self._text.lstrip("\n")
        self._step = self._think
        if not self._text and not self._final:
            # More line breaks may follow.
            self._step = self._trim
            return False
        return True

    def _think(self) -> bool:
        assert self._thinking is not None
        thought, close, rest = self._text.partition(self._thinking.close)
        if not close and not self._final:
            held = _held(thought, [self._thinking.close])
            settled = len(thought[: len(thought) - held].rstrip("\n"))
            thought, self._text = thought[:settled], thought[settled:]
            self._reason(thought)
            return False
        self._text = rest
        self._reason(thought.rstrip("\n"))
        self._step, self._strip = self._content, "\n"
        return bool(close)

    def _content(self) -> bool:
        if self._calls is None:
            self._say(self._text)
            self._text = ""
            return False
        if self._calls.bare and not self._said and not self._called:
            text = self._text.lstrip()
            if text.startswith("{"):
                self._block, self._text, self._step = ("", ""), text, self._in_block
                return True
        found = [(self._text.find(start), start, end) for start, end in self._calls.blocks]
        place, start, end = min((each for each in found if each[0] >= 0), default=(-1, "", ""))
        if place < 0:
            held = 0 if self._final else _held(self._text, [start for start, _ in self._calls.blocks])
            settled = len(self._text) - held
            self._say(self._text[:settled])
            self._text = self._text[settled:]
            return False
        self._say(self._text[:place])
        self._block, self._text, self._step = (start, end), self._text[place + len(start) :], self._in_block
        return True

    def _in_block(self) -> bool:
        assert self._calls is not None
        start, end = self._block
        place = self._text.find(end) if end else -1
        if place < 0 and not self._final:
            return False
        # A block that the end of the answer cut off may still hold complete calls.
        block, rest = (self._text, "") if place < 0 else (self._text[:place], self._text[place + len(end) :])
        calls = self._calls.parse(block, self._schemas)
        if calls:
            self._take(list(calls))
        else:
            self._say(start + (self._text if place < 0 else block + end))
        self._text, self._step = rest, self._content
        return True

    def _take(self, calls: list[ToolCall]) -> None:
        self._pieces.extend(calls)
        self._gap, self._strip, self._called = "", " \t\r\n", True

    def _reason(self, text: str) -> None:
        if text:
            self._pieces.append(Reasoning(text))

    def _say(self, text: str) -> None:
        text = self._gap + text
        if self._strip:
            text = text.lstrip(self._strip)
        kept = text.rstrip() if self._calls is not None else text
        self._gap = text[len(kept) :]
        if kept:
            self._pieces.append(Content(kept))
            self._said, self._strip = True, ""


def _held(text: str, marks: list[str]) -> int:
    """Returns how many characters at the end of `text` may be the start of a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
