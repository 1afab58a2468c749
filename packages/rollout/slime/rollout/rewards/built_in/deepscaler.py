r"""Math grading for reasoning models: 1 where the last \boxed{} after the reasoning equals the label.

A response must end its reasoning, by `</think>` or by a `###Response` heading; one that does not scores 0, so that the
format is learned with the answer. The comparison is that of `--rm-type math`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from slime.rollout.rewards.base import END_OF_THINKING, after_thinking
from slime.rollout.rewards.boxed import last_boxed
from slime.rollout.rewards.built_in.math import pool
from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

HEADING = "###Response"


async def reward(args: RolloutArgs, sample: Sample) -> float:
    solution = solution_of(sample.response)
    if solution is None or last_boxed(solution) is None or not str(sample.label).strip():
        return 0.0
    answered = copy.copy(sample)
    answered.response = solution
    return await pool.reward(args, answered)


def solution_of(response: str) -> str | None:
    """Returns the text after the reasoning; None for a response that is still reasoning."""
    if END_OF_THINKING in response:
        return after_thinking(response)
    if HEADING in response:
        return response.split(HEADING, 2)[1]
    return None
