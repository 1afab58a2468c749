"""Texts of single tokens, from the tokenizer in the run's model directories."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE = "tokenizer.json"


class TokenTexts:
    """Texts of tokens. Reads the tokenizer when it is first needed, and warns once if its file cannot be read."""

    def __init__(self, directories: list[Path]) -> None:
        """directories: where the tokenizer may be; the first directory that has one wins."""
        self._directories = directories

    @functools.cached_property
    def _tokenizer(self) -> Any:
        for directory in self._directories:
            if (directory / FILE).is_file():
                from tokenizers import Tokenizer

                try:
                    return Tokenizer.from_file(str(directory / FILE))
                except Exception as error:
                    # The library has no class for a file that is damaged, or of another version.
                    if type(error) is not Exception:
                        raise
                    log.warning("%s cannot be read: %s", directory / FILE, error)
        return None

    def of(self, tokens: list[int]) -> list[str] | None:
        """Returns the text of each token; None if no directory has a tokenizer."""
        if self._tokenizer is None:
            return None
        return [self._text(token) for token in tokens]

    @functools.lru_cache(maxsize=200_000)  # noqa: B019
    def _text(self, token: int) -> str:
        if token < 0:
            # A placeholder of an image or a sound, or a broken file.
            return ""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        # A part of a character, or a token that decodes to nothing.
        if not text or "�" in text:
            return self._tokenizer.id_to_token(token) or ""
        return text
