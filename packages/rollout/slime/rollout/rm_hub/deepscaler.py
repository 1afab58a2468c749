"""Compatibility: `--rm-type deepscaler` as a function of response and label."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.boxed import last_boxed
from slime.rollout.rewards.built_in.deepscaler import solution_of
from slime.rollout.rewards.built_in.math.pool import equal


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Returns 1 where the last \\boxed{} after the reasoning equals the label, else 0."""
    solution = solution_of(response)
    if solution is None or last_boxed(solution) is None or not str(label).strip():
        return 0
    return int(equal(solution, str(label)))
