"""Texts of single tokens, by the tokenizer in the run's model directories."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

FILE = "tokenizer.json"


class TokenTexts:
    """Reads the tokenizer when it is first needed; without one, `of` returns None."""

    def __init__(self, directories: list[Path]) -> None:
        """directories: where it may be, the first that has one wins."""
        self._directories = directories

    @functools.cached_property
    def _tokenizer(self) -> Any:
        for directory in self._directories:
            if (directory / FILE).is_file():
                from tokenizers import Tokenizer

                try:
                    return Tokenizer.from_file(str(directory / FILE))
                except Exception:
                    # The library raises plain Exceptions for files of other versions.
                    continue
        return None

    def of(self, tokens: list[int]) -> list[str] | None:
        if self._tokenizer is None:
            return None
        return [self._text(token) for token in tokens]

    @functools.lru_cache(maxsize=200_000)  # noqa: B019
    def _text(self, token: int) -> str:
        if token < 0:
            # A place that an image or a sound took, or a broken file.
            return ""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        # A part of a character, or a token that decodes to nothing.
        if not text or "�" in text:
            return self._tokenizer.id_to_token(token) or ""
        return text
