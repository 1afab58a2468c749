"""`boxed_NAME`: the reward NAME on what stands in the last \\boxed{...} of the response."""

from __future__ import annotations

import copy
from typing import Any

from slime.rollout.rewards.registry import RewardFunction
from slime.types import Sample


def of_boxed(function: RewardFunction) -> RewardFunction:
    async def reward(args: Any, sample: Sample) -> Any:
        shown = copy.copy(sample)
        shown.response = last_boxed(sample.response) or ""
        return await function(args, shown)

    return reward


def last_boxed(text: str) -> str | None:
    """What stands between the braces of the last \\boxed; None where there is none or it is not closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None
