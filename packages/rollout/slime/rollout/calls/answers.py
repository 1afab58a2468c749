"""Checks the answers of the user's rollout and evaluation functions before anything is stored."""

from __future__ import annotations

import math
import numbers
from typing import Any

from slime.rollout.calls.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput, flatten
from slime.types import Sample
from slime.types.errors import InvalidField, PluginError

TRAIN = "RolloutFnTrainOutput(samples=[[Sample, ...], ...])"
EVALUATION = 'RolloutFnEvalOutput(data={name: {"rewards": [...], "truncated": [...], "samples": [...]}})'


def train_output(answer: Any, path: str) -> tuple[list[list[Sample]], dict[str, Any]]:
    """Returns the groups, each flattened to a list of samples, and the metrics.

    answer: a RolloutFnTrainOutput, or a plain list of groups. path: the function's, for errors. Raises PluginError for
    anything else, InvalidField for segments of one sample that do not share one rollout_id.
    """
    output = answer if isinstance(answer, RolloutFnTrainOutput) else RolloutFnTrainOutput(samples=answer)
    groups = output.samples
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise _wrong("--rollout-function-path", path, groups, TRAIN)
    _check_metrics("--rollout-function-path", path, output.metrics)
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
    """Returns the answer as a RolloutFnEvalOutput; a dict becomes its `data`. Raises PluginError for anything else."""
    output = answer if isinstance(answer, RolloutFnEvalOutput) else RolloutFnEvalOutput(data=answer)
    if not isinstance(output.data, dict):
        raise _wrong("--eval-function-path", path, output.data, EVALUATION)
    for name, result in output.data.items():
        if not isinstance(result, dict) or "rewards" not in result:
            raise _wrong("--eval-function-path", path, result, EVALUATION)
        _check_set(name, result, path)
    _check_metrics("--eval-function-path", path, output.metrics)
    return output


def _check_set(name: Any, result: dict[str, Any], path: str) -> None:
    """Raises PluginError unless the lists have one length, the rewards are finite numbers and the samples Samples."""
    lengths = {}
    for key in ("rewards", "truncated", "samples"):
        values = result.get(key)
        if values is None and key != "rewards":
            continue
        if values is not None and hasattr(values, "tolist"):
            values = result[key] = values.tolist()
        if not isinstance(values, (list, tuple)):
            raise _unfit(path, f"{key} of {name}", type(values).__name__, "a list")
        lengths[key] = len(values)
    # `truncated` and `samples` may be left out or empty.
    if len({length for key, length in lengths.items() if length or key == "rewards"}) > 1:
        raise _unfit(path, f"{name}", ", ".join(f"{n} {key}" for key, n in lengths.items()), "lists of one length")
    for reward in result["rewards"]:
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise _unfit(path, f"rewards of {name}", repr(reward), "finite numbers")
    for sample in result.get("samples") or ():
        if not isinstance(sample, Sample):
            raise _unfit(path, f"samples of {name}", type(sample).__name__, "Samples")


def _check_metrics(flag: str, path: str, metrics: Any) -> None:
    if not isinstance(metrics or {}, dict):
        raise _wrong(flag, path, metrics, "metrics that are a dict")


def _unfit(path: str, what: str, got: str, expected: str) -> PluginError:
    flag = "--eval-function-path"
    return PluginError(
        f"{flag} {path}: {what}: got {got}, expected {expected}", field=flag, value=got, expected=expected
    )


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
