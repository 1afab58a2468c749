"""Checks what plug-ins return in place of an iteration's training rewards, or of all its training data.

--custom-reward-post-process-path: fn(args, samples) -> (raw rewards, training rewards)

--custom-convert-samples-to-train-data-path: fn(args, samples) -> dict of lists of one length
    tokens                ids of prompt and response
    response_lengths      number of response tokens, at the end of `tokens`
    rewards               training rewards; they are not normalised again
    loss_masks            a number for each response token
    raw_reward            for metrics; default: `rewards`
    truncated             true for a response that was cut off; default: false
    sample_indices        index of the sample that each comes from; default: in order, where there are as many
    rollout_ids           equal for the samples of one trajectory; default: each is one
    rollout_mask_sums     divisor of the mean over a trajectory's tokens; default: the sum of its masks
    rollout_log_probs     the engine's, a number for each response token; default: none
    teacher_log_probs     of --opd-type sglang, a number for each response token; default: none
    multimodal_train_inputs   inputs made of the prompt's images; default: those of the sample it comes from
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.trainer.batching.packing import loss_mask
from slime.types.errors import InvalidField, counted
from slime.types.sample import Sample, SampleStatus
from slime.types.sample.summary import SampleSummary

PROCESS_FLAG = "--custom-reward-post-process-path"
REQUIRED = ("tokens", "response_lengths", "rewards", "loss_masks")
OPTIONAL = (
    "raw_reward", "truncated", "sample_indices", "rollout_ids", "rollout_mask_sums", "rollout_log_probs",
    "teacher_log_probs", "multimodal_train_inputs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Converted:
    """Samples and their rewards. rollout_mask_sums: None for the sums of the trajectories' own masks."""

    samples: list[Sample]
    raw_rewards: list[float]
    rewards: list[float]
    rollout_mask_sums: list[int] | None

    def summaries(self) -> list[SampleSummary]:
        return [
            SampleSummary(
                index=sample.index if sample.index is not None else position,
                group_index=position,
                rollout_id=sample.rollout_id,
                total_length=len(sample.array("tokens")),
                response_length=sample.response_length,
                loss_mask_sum=int(loss_mask(sample).sum()),
                reward=self.rewards[position],
            )
            for position, sample in enumerate(self.samples)
        ]


def converted(data: Any, sources: Sequence[Sample]) -> Converted:
    """Reads the `data` that the function made of `sources`. Raises InvalidField naming the key that is wrong."""
    if not isinstance(data, Mapping):
        raise InvalidField("train data", type(data).__name__, "a dictionary of lists")
    for name in REQUIRED:
        if data.get(name) is None:
            raise InvalidField(f"train data[{name!r}]", None, "a list with one entry per sample")
    number = len(data["tokens"])
    for name in (*REQUIRED, *OPTIONAL):
        if data.get(name) is not None and len(data[name]) != number:
            raise InvalidField(f"train data[{name!r}]", len(data[name]), f"{number}, the number of entries of tokens")
    by_index: dict[int | None, list[Sample]] = {}
    for source in sources:
        by_index.setdefault(source.index, []).append(source)
    samples = [_sample(data, i, _origin(data, i, sources, by_index)) for i in range(number)]
    rewards = [_number("rewards", i, value) for i, value in enumerate(data["rewards"])]
    raw = data.get("raw_reward")
    sums = data.get("rollout_mask_sums")
    return Converted(
        samples,
        rewards if raw is None else [_number("raw_reward", i, value) for i, value in enumerate(raw)],
        rewards,
        None if sums is None else [_count("rollout_mask_sums", i, value) for i, value in enumerate(sums)],
    )


def _origin(
    data: Mapping[str, Any], i: int, sources: Sequence[Sample], by_index: Mapping[int | None, list[Sample]]
) -> Sample | None:
    """Returns the sample that row `i` comes from, None where that is not known.

    Raises InvalidField where it is not known, and the row is to have its images.
    """
    if data.get("sample_indices") is None:
        if len(data["tokens"]) == len(sources):
            return sources[i]
        if data.get("multimodal_train_inputs") is None and any(sample.multimodal_train_inputs for sample in sources):
            raise InvalidField(
                "train data['sample_indices']", None,
                f"the index of the sample that each of {counted(len(data['tokens']), 'row')} comes from, for its "
                f"images: there are {counted(len(sources), 'sample')}",
            )  # fmt: skip
        return None
    index = int(data["sample_indices"][i])
    found = by_index.get(index, [])
    if len(found) > 1:
        # The samples of a trajectory have one index.
        same = [sample for sample in found if np.array_equal(sample.array("tokens"), data["tokens"][i])]
        if not same and data.get("multimodal_train_inputs") is None and any(s.multimodal_train_inputs for s in found):
            raise InvalidField(
                f"train data['multimodal_train_inputs'][{i}]", None,
                f"the inputs made of its images: {counted(len(found), 'sample')} have index {index}, none its tokens",
            )  # fmt: skip
        found = same
    return found[0] if found else None


def _mask(values: Any, i: int) -> np.ndarray:
    mask = np.asarray(values)
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.size:
        raise InvalidField(
            f"train data['loss_masks'][{i}]", wrong.flat[0].item(),
            "0 or 1 for each token; tokens are weighted by --custom-tis-function-path or in a custom loss",
        )  # fmt: skip
    return mask.astype(np.uint8)


def _sample(data: Mapping[str, Any], i: int, source: Sample | None) -> Sample:
    def entry(name: str, default: Any = None) -> Any:
        return default if data.get(name) is None else data[name][i]

    index, rollout = entry("sample_indices"), entry("rollout_ids")
    if index is None:
        index = i if source is None else source.index
    sample = Sample(
        index=None if index is None else int(index),
        rollout_id=None if rollout is None else int(rollout),
        tokens=entry("tokens"),
        response_length=int(entry("response_lengths")),
        loss_mask=_mask(entry("loss_masks"), i),  # type: ignore[arg-type]
        rollout_log_probs=entry("rollout_log_probs"),
        teacher_log_probs=entry("teacher_log_probs"),
        status=SampleStatus.TRUNCATED if entry("truncated", 0) else SampleStatus.COMPLETED,
    )
    for name, field in (
        ("loss_masks", "loss_mask"),
        ("rollout_log_probs", "rollout_log_probs"),
        ("teacher_log_probs", "teacher_log_probs"),
    ):
        values = sample.array(field)
        if values is not None and len(values) != sample.response_length:
            raise InvalidField(
                f"train data[{name!r}][{i}]", len(values), f"response_lengths[{i}] = {sample.response_length} numbers"
            )
    if source is not None and source.response_length == sample.response_length:
        sample.spans, sample.weight_versions = source.spans, source.weight_versions
        if np.array_equal(source.array("tokens"), sample.array("tokens")):  # type: ignore[arg-type]
            sample.rollout_top_p_token_ids = source.rollout_top_p_token_ids
            sample.rollout_top_p_token_offsets = source.rollout_top_p_token_offsets
    sample.multimodal_train_inputs = entry("multimodal_train_inputs")
    if source is not None and data.get("multimodal_train_inputs") is None:
        sample.multimodal_train_inputs = source.multimodal_train_inputs
        sample.multimodal_train_input_id = source.multimodal_train_input_id
    return sample


def _number(name: str, i: int, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidField(f"train data[{name!r}][{i}]", value, "a finite number")
    return number


def _count(name: str, i: int, value: Any) -> int:
    number = _number(name, i, value)
    if not number.is_integer():
        raise InvalidField(f"train data[{name!r}][{i}]", value, "a whole number")
    return int(number)


def processed_rewards(answer: Any, count: int) -> tuple[list[float], list[float]]:
    """Reads the `answer` for `count` samples. Raises InvalidField naming the flag, the sample and the value."""
    expected = f"{count} raw and {counted(count, 'training reward')}"
    if (
        not isinstance(answer, (list, tuple))
        or len(answer) != 2
        or not all(hasattr(part, "__len__") for part in answer)
    ):
        got = counted(len(answer), "item") if isinstance(answer, (list, tuple)) else type(answer).__name__
        raise InvalidField(PROCESS_FLAG, got, expected)
    if {len(part) for part in answer} != {count}:
        raise InvalidField(PROCESS_FLAG, " and ".join(str(len(part)) for part in answer), expected)
    raw, rewards = ([_finite(value, position) for position, value in enumerate(part)] for part in answer)
    return raw, rewards


def _finite(value: Any, position: int) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidField(PROCESS_FLAG, value, f"finite numbers (sample {position} of the iteration)")
    return number
