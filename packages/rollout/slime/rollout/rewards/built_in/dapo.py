r"""The rule of DAPO (Yu et al. 2025, arXiv:2503.14476): the integer after the last `Answer:` of the response.

Returns {"score": 1.0 or -1.0, "acc": bool, "pred": str}; train with --reward-key score. Only the last 300
characters are read. The answer may be boxed, in dollars, written as `x = 42`, with thousands separators or a unit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from slime.rollout.rewards.boxed import last_boxed
from slime.types import Sample
from slime.types.errors import InvalidField

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

CHARACTERS = 300
INVALID = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TEXT = re.compile(r"\\(?:text|textbf|mbox|overline|mathrm)\s*\{([^{}]*)\}")
_MARKUP = re.compile(r"\\[$ ;!,]|\^\s*\{?\s*\\circ\s*\}?|\{,\}|\\l?dots|<\|im_end\|>|<\|endoftext\|>|[\"$*]")
# Units and nouns that the answers of the data set carry.
_UNITS = re.compile(
    r"\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|"
    r"meters|meals|edges|students|multiples)\b"
)
_INTEGER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?")


def reward(args: RolloutArgs, sample: Sample) -> dict[str, Any]:
    """Raises InvalidField for a label that is not an integer."""
    return score(sample.response, sample.label, sample.index)


def score(response: str, label: Any, index: int | None = None) -> dict[str, Any]:
    expected = _integer(str(label).strip())
    if expected is None:
        raise InvalidField("label", label, "an integer", f"sample {index} has the label {label!r}: --rm-type dapo "
                           "compares integers")  # fmt: skip
    found = _ANSWER.findall(response[-CHARACTERS:])
    predicted = normalized(found[-1]) if found else INVALID
    correct = _integer(predicted) == expected
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": predicted}


def normalized(answer: str) -> str:
    """Returns an answer without box, markup and units; an integer without separators."""
    boxed = last_boxed(answer)
    plain = (answer if boxed is None else boxed).rpartition("=")[2]
    plain = _TEXT.sub(r" \1 ", plain)
    plain = _UNITS.sub("", _MARKUP.sub("", plain))
    plain = " ".join(plain.split()).rstrip(".")
    integer = _integer(plain)
    return plain if integer is None else str(integer)


def _integer(text: str) -> int | None:
    found = _INTEGER.fullmatch(text.strip())
    return int(found[0].partition(".")[0].replace(",", "")) if found else None
