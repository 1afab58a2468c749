"""Compatibility: `--rm-type math` as functions of two answers; they are compared mathematically."""

from __future__ import annotations

from typing import Any

from slime.rollout.rewards.boxed import last_boxed
from slime.rollout.rewards.built_in.math.pool import equal


def extract_answer(passage: str) -> str | None:
    """Returns the content of the last \\boxed{} of a text; None without one."""
    return last_boxed(passage)


extract_boxed_answer = extract_answer


def grade_answer(given_answer: str | None, ground_truth: Any) -> bool:
    """Returns whether two answers without boxes are equal as mathematics."""
    if given_answer is None or not str(given_answer).strip():
        return False
    return bool(equal(f"\\boxed{{{given_answer}}}", str(ground_truth)))


# slime has two rules and accepts an answer that passes either; here one comparison covers both.
grade_answer_mathd = grade_answer_sympy = grade_answer


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Returns whether the last \\boxed{} of a response equals the label, which may be boxed itself."""
    return bool(
        ground_truth is not None and last_boxed(solution_str) is not None and equal(solution_str, str(ground_truth))
    )
