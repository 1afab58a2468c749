"""Finds a sequence that begins like a new prompt, so that only the rest of the prompt is computed.

Prompts of a task have its instructions and examples in common, turns of a conversation all turns before them.
"""

from __future__ import annotations

from collections.abc import Sequence

# Tokens by which prefixes are looked up: shorter ones are computed again.
BLOCK = 16


def fingerprints(tokens: Sequence[int]) -> list[int]:
    """Returns a number for the first `BLOCK` tokens, for twice as many, and so on."""
    found, last = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        last = hash((last, *tokens[end - BLOCK : end]))
        found.append(last)
    return found


class Beginnings:
    """Sequences whose keys and values are in a row of the cache, or will be before those of the prompt are needed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Sequence[int]]] = {}

    def add(self, row: int, tokens: Sequence[int], prints: Sequence[int]) -> None:
        """Adds a sequence and the fingerprints of its tokens."""
        for each in prints:
            self._known.setdefault(each, (row, tokens))

    def longest(self, tokens: Sequence[int], prints: Sequence[int]) -> tuple[int, int]:
        """Returns a row, and how many of the first tokens it has too: never all, because the last one is computed.

        (0, 0) where there is none.
        """
        for each in reversed(prints):
            if each in self._known:
                row, others = self._known[each]
                pairs = zip(tokens[:-1], others, strict=False)
                most = min(len(tokens) - 1, len(others))
                common = next((i for i, (token, other) in enumerate(pairs) if token != other), most)
                # Different tokens may have one fingerprint.
                return (row, common) if common >= BLOCK - 1 else (0, 0)
        return 0, 0
