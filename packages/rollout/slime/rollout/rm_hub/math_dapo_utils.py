"""Compatibility: `--rm-type dapo` as a function of response and label."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.boxed import last_boxed
from slime.rollout.rewards.built_in.dapo import normalized, score

__all__ = ["compute_score", "last_boxed_only_string", "normalize_final_answer", "remove_boxed"]

BOX = "\\boxed{"
STRICT_CHARACTERS = 100


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """Returns {"score": 1.0 or -1.0, "acc": bool, "pred": str}; strict_box_verify compares the last box literally."""
    if not strict_box_verify:
        return score(solution_str, ground_truth)
    begin = len(solution_str) - STRICT_CHARACTERS
    if pause_tokens_index is not None:
        begin = pause_tokens_index[-1] - STRICT_CHARACTERS
    predicted = last_boxed(solution_str[max(0, begin) :])
    correct = predicted == ground_truth
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": predicted}


def normalize_final_answer(final_answer: Any) -> str:
    """Returns an answer without box, markup and units; an integer without separators."""
    return normalized(str(final_answer))


def last_boxed_only_string(string: str) -> str | None:
    """Returns the last closed \\boxed{...} of a text, braces included."""
    inside = last_boxed(string)
    return None if inside is None else f"{BOX}{inside}}}"


def remove_boxed(s: str) -> str:
    """Returns the text between the braces. Raises ValueError for text that is not \\boxed{...}."""
    if not (s.startswith(BOX) and s.endswith("}")):
        raise ValueError(f"expected \\boxed{{...}}, got {s[:100]!r}")
    return s[len(BOX) : -1]
