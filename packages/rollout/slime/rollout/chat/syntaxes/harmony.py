"""Parser of gpt-oss answers: a list of messages, each with a channel and optionally a tool as its recipient."""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.chat.pieces import Content, Piece, Reasoning, ToolCall

MESSAGE = "<|message|>"
# A message ends with one of these; the header of the next message may follow at once.
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MARKS = (*ENDS, MESSAGE)
TOOL = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyParser:
    """Channel `analysis` is reasoning; a message to `functions.NAME` is a tool call; everything else is content."""

    def __init__(self) -> None:
        self._text = ""
        self._kind: Any = None
        self._tool = ""
        self._arguments = ""

    def feed(self, text: str) -> list[Piece]:
        self._text += text
        return self._run(final=False)

    def finish(self) -> list[Piece]:
        return [*self._run(final=True), *self._close()]

    def _run(self, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while self._text:
            if self._kind is None:
                if not self._header(final):
                    return pieces
                continue
            place, mark = min(((p, m) for m in ENDS if (p := self._text.find(m)) >= 0), default=(-1, ""))
            if place < 0:
                held = 0 if final else _held(self._text)
                settled = len(self._text) - held
                pieces += self._body(self._text[:settled])
                self._text = self._text[settled:]
                return pieces
            pieces += [*self._body(self._text[:place]), *self._close()]
            # The header of the next message begins with the mark.
            self._text = self._text[place:]
        return pieces

    def _header(self, final: bool) -> bool:
        """Reads the header of a message. Returns False if it is incomplete."""
        if not self._text.startswith("<"):
            self._kind = Content
            return True
        header, mark, rest = self._text.partition(MESSAGE)
        if not mark:
            if final and not self._text.startswith(MARKS):
                self._kind = Content
                return True
            if final:
                # A mark without a message, such as the one that ends the answer.
                self._text = ""
            return False
        tool = TOOL.search(header)
        self._kind = ToolCall if tool else Reasoning if "<|channel|>analysis" in header else Content
        self._tool, self._text = tool[1] if tool else "", rest
        return True

    def _body(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._kind is ToolCall:
            self._arguments += text
            return []
        return [self._kind(text)]

    def _close(self) -> list[Piece]:
        calls: list[Piece] = [ToolCall(self._tool, self._arguments.strip() or "{}")] if self._kind is ToolCall else []
        self._kind, self._tool, self._arguments = None, "", ""
        return calls


def _held(text: str) -> int:
    return max((n for mark in MARKS for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
