"""Escapes characters that would control a terminal: prompts, samples and logs may hold any."""

from __future__ import annotations

import unicodedata

# Characters that show text in another order than it is in.
DIRECTIONS = frozenset("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
CONTROLS_AND_SURROGATES = ("Cc", "Cs")


def printable(text: str) -> str:
    """Returns one line in which these characters, and those that no terminal can show, are escaped as in Python."""
    return "".join(
        char.encode("unicode_escape").decode()
        if char in DIRECTIONS or unicodedata.category(char) in CONTROLS_AND_SURROGATES
        else char
        for char in text
    )
