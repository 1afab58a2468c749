"""`boxed_NAME`: the reward NAME on the content of the last \\boxed{...} of the response."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from slime.rollout.rewards.base import RewardFunction
from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# An escaped brace, as around a set, is text.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def score_boxed(function: RewardFunction) -> RewardFunction:
    """Returns `function` as a reward of the box's content, which is empty for a response without a closed box."""

    async def reward(args: RolloutArgs, sample: Sample) -> Any:
        boxed = copy.copy(sample)
        boxed.response = last_boxed(sample.response) or ""
        return await function(args, boxed)

    return reward


def last_boxed(text: str) -> str | None:
    """Returns the text between the braces of the last \\boxed or \\fbox; None without one, or if it is not closed."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    begin, depth = boxes[-1].end(), 1
    for token in _BRACE.finditer(text, begin):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return text[begin : token.start()]
    return None
