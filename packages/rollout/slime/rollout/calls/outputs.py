"""Outputs of rollout functions and of evaluation functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """The answer of a rollout function.

    samples: one list per group; an element may itself be a list, of the segments that one trajectory fanned out into.
    """

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """The answer of an evaluation function.

    data: for the name of each set, {"rewards": [...], "truncated": [...], "samples": [...]}, in sample order.
    """

    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Calls a rollout function; wraps a plain list of groups, or a dict of evaluation results, in its output class."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)


def flatten(group: Sequence[Any]) -> list[Sample]:
    """Returns the samples of a group in order, whatever the depth of nested lists."""
    flat: list[Sample] = []
    for item in group:
        flat.extend(flatten(item) if isinstance(item, (list, tuple)) else [item])
    return flat
