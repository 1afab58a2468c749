"""What the user's rollout and evaluation functions may answer, checked before anything of it is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generate.group import flatten
from slime.types import Sample
from slime.types.errors import InvalidField, PluginError
from slime.types.plugins import load_plugin

TRAIN = "RolloutFnTrainOutput(samples=[[Sample, ...], ...])"
EVALUATION = 'RolloutFnEvalOutput(data={name: {"rewards": [...], "truncated": [...], "samples": [...]}})'


def load_rollout_function(path: str, flag: str) -> Callable[..., Any]:
    """Contract: `fn(args, rollout_id, data_source, evaluation=False)`. Raises PluginError."""
    return load_plugin(path, flag=flag, parameters=("args", "rollout_id", "data_source"), keywords=("evaluation",))


def train_output(answer: Any, path: str) -> tuple[list[list[Sample]], dict[str, Any]]:
    """The groups, flat, and the metrics of a RolloutFnTrainOutput, or of a plain list of groups.

    Raises PluginError for anything else, InvalidField for segments of one sample that share no rollout_id.
    """
    output = answer if isinstance(answer, RolloutFnTrainOutput) else RolloutFnTrainOutput(samples=answer)
    groups = output.samples
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise _wrong("--rollout-function-path", path, groups, TRAIN)
    flat = [flatten(group) for group in groups]
    for group, samples in zip(groups, flat, strict=True):
        for sample in samples:
            if not isinstance(sample, Sample):
                raise _wrong("--rollout-function-path", path, sample, TRAIN)
        for segments in group:
            if isinstance(segments, list):
                _check_segments(segments, path)
    return flat, dict(output.metrics or {})


def evaluation_output(answer: Any, path: str) -> RolloutFnEvalOutput:
    """A RolloutFnEvalOutput, or the dict that is its `data`. Raises PluginError for anything else."""
    output = answer if isinstance(answer, RolloutFnEvalOutput) else RolloutFnEvalOutput(data=answer)
    if not isinstance(output.data, dict):
        raise _wrong("--eval-function-path", path, output.data, EVALUATION)
    for result in output.data.values():
        if not isinstance(result, dict) or "rewards" not in result:
            raise _wrong("--eval-function-path", path, result, EVALUATION)
    return output


def _check_segments(segments: list[Any], path: str) -> None:
    ids = {sample.rollout_id for sample in flatten(segments)}
    if len(ids) != 1 or None in ids:
        raise InvalidField(
            "rollout_id",
            sorted(ids, key=str),
            "one value for all segments that a sample fanned out into",
            f"--rollout-function-path {path}: segments of one sample have the rollout_id "
            f"{', '.join(map(str, sorted(ids, key=str)))}, expected one value for all of them",
        )


def _wrong(flag: str, path: str, answer: Any, expected: str) -> PluginError:
    got = type(answer).__name__
    return PluginError(f"{flag} {path}: answered {got}, expected {expected}", field=flag, value=got, expected=expected)
