"""Compatibility: `--rm-type ifbench` as a function of response and metadata."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.built_in.ifbench import score


def compute_ifbench_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """Returns 1.0 where a response satisfies all instructions of metadata, else 0.0; `label` is not read."""
    return score(response, metadata or {})
