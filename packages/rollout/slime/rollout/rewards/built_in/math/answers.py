r"""The answer of a response and whether it equals the label, by math-verify.

1. The last \boxed{...} of the response is its answer, whatever else it says; a box that is not closed holds none.
2. Without a box math-verify looks for the answer in the end of the response.
3. In both sides, notations that math-verify does not read are rewritten: 1 000, 1e3, \varnothing, Unicode signs,
   units in \text, degrees, LaTeX spaces. Equal texts are equal; otherwise math-verify and sympy compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from slime.rollout.rewards.boxed import BOX, last_boxed

# Maximum characters of an answer in a box, and of the end of a response that is searched where there is no box.
LONGEST_ANSWER = 1000
LONGEST_SEARCH = 2000

_UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ",
    "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ",
    "±": r"\pm ", "°": r"^\circ ", "½": r"\frac{1}{2}", "²": "^2", "³": "^3", "\u00a0": " ", "\u202f": " ",
})  # fmt: skip


def _joined(match: re.Match[str]) -> str:
    return match[0].replace(" ", "")


_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\s*\.?(?=[\s()\[\]\\|{}]|$)", ""),
    (r"(?<!\\)\\!", ""),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"\{,\}", ","),
    (r"\\[dt]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", ""),
    # Thousands: 12 345 678.
    (r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d])", _joined),
    # Numbers such as 1e3 and 2.5E-4.
    (r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])", r"\1 \\times 10^{\2}"),
]
_SUBSTITUTIONS = [(re.compile(pattern), text) for pattern, text in _REWRITES]
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox)\s*\{([^{}]*)\}")
# Words, where `ab` could also mean a product.
_PROSE = re.compile(r"\\text|[A-Za-z]{4}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z .,'()-]*")


def equal(response: str, label: str) -> bool:
    """Returns whether the answer of a response equals the label, which may be in a box itself."""
    gold = last_boxed(label) if BOX.search(label) else label
    if gold is None or not gold.strip() or len(gold) > LONGEST_ANSWER:
        return False
    if not BOX.search(response):
        end = response[-LONGEST_SEARCH:]
        return _alike(clean(end), clean(gold)) or _verified(clean(gold), _rewritten(end), whole=False)
    answer = last_boxed(response)
    if answer is None or not answer.strip() or len(answer) > LONGEST_ANSWER:
        return False
    return same(answer, gold)


def same(answer: str, gold: str) -> bool:
    """Returns whether two answers without boxes are equal as mathematics."""
    answer, gold = clean(answer), clean(gold)
    if _alike(answer, gold):
        return True
    if _words(answer) and _words(gold) and any(map(_PROSE.search, (answer, gold))):
        return False
    return _verified(gold, answer, whole=True)


def clean(text: str) -> str:
    text = " ".join(_rewritten(text.strip().strip("$").strip()).split())
    return text.rstrip(".").rstrip() if not text.endswith("..") else text


def _rewritten(text: str) -> str:
    text = text.translate(_UNICODE)
    for pattern, replacement in _SUBSTITUTIONS:
        text = pattern.sub(replacement, text)
    return text


def _alike(answer: str, gold: str) -> bool:
    words = _words(answer)
    return answer.replace(" ", "") == gold.replace(" ", "") or bool(words) and words == _words(gold)


def _words(text: str) -> str:
    """Returns a text of words (no solution, Monday, (A)) in one common form; "" for any other text."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).split())
    if not _WORDS.fullmatch(plain.strip("()")) or "\\" in plain:
        return ""
    return plain.strip("(). ").casefold()


def _verified(gold: str, answer: str, *, whole: bool) -> bool:
    from math_verify import parse, verify

    golden = parse(f"${gold}$" if "$" not in gold else gold, parsing_timeout=None)
    found = parse(f"${answer}$" if whole else answer, parsing_timeout=None)
    return bool(golden) and bool(verify(golden, found, timeout_seconds=None))
