"""Token F1 between response and label, as SQuAD computes it (Rajpurkar et al. 2016, arXiv:1606.05250).

    F1 = 2 P R / (P + R),  P = common / tokens of the response,  R = common / tokens of the label

over words in lower case without punctuation and articles. `yes`, `no` and `noanswer` match only themselves.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

CLOSED = frozenset({"yes", "no", "noanswer"})
_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]")


def reward(args: RolloutArgs, sample: Sample) -> float:
    return f1_score(sample.response, str(sample.label))[0]


def f1_score(prediction: str | None, label: str) -> tuple[float, float, float]:
    """Returns (F1, precision, recall)."""
    predicted, expected = _words(prediction or ""), _words(label)
    if predicted != expected and {" ".join(predicted), " ".join(expected)} & CLOSED:
        return 0.0, 0.0, 0.0
    common = (Counter(predicted) & Counter(expected)).total()
    if common == 0:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall), precision, recall


def _words(text: str) -> list[str]:
    return [word for word in _PUNCTUATION.sub("", text.lower()).split() if word not in _ARTICLES]
