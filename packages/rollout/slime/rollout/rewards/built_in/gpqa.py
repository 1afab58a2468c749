r"""Multiple choice: 1 where the response chooses the right option, by letter or, without a letter, by its text.

The right option comes from the first of these: metadata["correct_letter"], the label as a letter, as the index of an
option or as the text of one of metadata["choices"] (a list, or a mapping of letters). metadata["valid_letters"] limits
the letters; by default they are those of the choices, else A to J. The reasoning up to `</think>` is not read.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.rollout.rewards.base import after_thinking
from slime.rollout.rewards.boxed import last_boxed
from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

LETTERS = string.ascii_uppercase[:10]
# "The answer is (B)", "Option: **C**", "B is correct". A small letter counts only at the end of a line, as "is a gas"
# chooses nothing.
_LETTER = r"([A-Z]\b|[a-z](?=[\s*_)\]$}.]*(?:\n|$)))"
_STATED = (
    re.compile(r"\b(?i:answer|option|choice)\b\s*(?:(?i:is)\b|:)?\s*[*_(\[$\\{]*" + _LETTER),
    re.compile(r"\b([A-Z])\b[\s)\]*.]*(?i:is\s+(?:the\s+)?correct)\b"),
)
_ALONE = re.compile(r"\b([A-Z])\b")


def reward(args: RolloutArgs, sample: Sample) -> float:
    return score(sample.response, sample.label, sample.metadata)


def score(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    question = _question(label, metadata or {})
    answer = after_thinking(response or "")
    letter = chosen_letter(answer, question.letters)
    if letter is not None and question.letter is not None:
        return float(letter == question.letter)
    plain = f" {_plain(answer)} "
    return float(any(f" {text} " in plain for text in question.texts))


@dataclass(frozen=True)
class _Question:
    letters: str
    letter: str | None
    texts: frozenset[str]  # every known form of the right answer, in lower-case words


def _question(label: Any, metadata: dict[str, Any]) -> _Question:
    options = metadata.get("choices") or ()
    choices = [str(option) for option in (options.values() if isinstance(options, dict) else options)]
    letters = "".join(str(letter).strip().upper()[:1] for letter in metadata.get("valid_letters") or ())
    letters = letters or string.ascii_uppercase[: len(choices)] or LETTERS
    text = label.strip() if isinstance(label, str) else ""
    letter = metadata.get("correct_letter")
    if isinstance(letter, str) and letter.strip():
        letter = letter.strip().upper()
    elif isinstance(label, int | float) and not isinstance(label, bool) and 0 <= int(label) < len(letters):
        letter = letters[int(label)]
    elif len(text) == 1 and text.upper() in letters:
        letter = text.upper()
    else:
        same = (i for i, choice in enumerate(choices) if text and _plain(choice) == _plain(text) and i < len(letters))
        letter = next((letters[i] for i in same), None)
    texts = [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    if letter is not None and letter in letters and letters.index(letter) < len(choices):
        texts.append(choices[letters.index(letter)])
    if len(text) > 1 or text.upper() not in letters:
        texts.append(text)
    return _Question(letters, letter, frozenset(filter(None, map(_plain, texts))))


def chosen_letter(answer: str, letters: str) -> str | None:
    """Returns the option that an answer states last: in a box, else in words, else as a letter that stands alone."""
    boxed = re.sub(r"\\text|[^A-Za-z]", "", last_boxed(answer) or "").upper()
    if len(boxed) == 1 and boxed in letters:
        return boxed
    for pattern in _STATED:
        stated = [letter for letter in map(str.upper, pattern.findall(answer)) if letter in letters]
        if stated:
            return stated[-1]
    alone = [letter for letter in _ALONE.findall(answer) if letter in letters]
    return alone[-1] if alone else None


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))
