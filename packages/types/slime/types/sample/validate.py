"""Rules between the fields of a sample: for any sample, and for a finished one that is trained on.

Producers in Python and the buffer call the same functions, so both accept the same samples.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.types.errors import InvalidField, counted
from slime.types.sample.fields import RowCount
from slime.types.sample.status import SampleStatus

if TYPE_CHECKING:
    from slime.types.sample.fields import ArrayField
    from slime.types.sample.sample import Sample

FINISHED = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED)
# Weight version of an SGLang engine before its first weight update.
NO_VERSION = "default"
MAX_VERSION = 2**63 - 1
# A log-softmax in float32 may exceed 0 by its rounding error.
LOG_PROB_ROUNDING = 1e-4
# Far below the log-prob of any sampled token. Values such as -3e38 stand for masked tokens, and their sums overflow.
LEAST_LOG_PROB = -1e6
# About thirty years.
MOST_SECONDS = 1e9
# Rewards become float32 tensors.
MAX_REWARD = float(np.finfo(np.float32).max)
# Fields that travel as JSON, which clients in other languages cannot read if it holds NaN or Infinity.
JSON_FIELDS = ("prompt", "label", "metadata", "train_metadata", "apply_chat_template_kwargs")
# Other languages read numbers as float64, which cannot hold every larger integer.
MAX_COUNT = 2**53


def validate_sample(sample: Sample) -> None:
    """Checks the rules for every sample, finished or not.

    Raises InvalidField for the first rule that `sample` breaks:

    - tokens and rollout_top_p_token_ids are at least 0
    - 0 <= response_length <= len(tokens)
    - loss_mask, rollout_log_probs, teacher_log_probs: None or [response_length]; a mask holds 0 and 1, log-probs lie
      between LEAST_LOG_PROB and 0
    - rollout_top_p_*: both or none; offsets [response_length + 1], from 0, never falling, up to len(ids)
    - rollout_routed_experts: None or [len(tokens) - 1, layers, top_k]
    - spans lie in the response, in order, without overlap
    - weight versions are whole numbers, or "default"
    - numbers in prompt, label, metadata, train_metadata, apply_chat_template_kwargs and attributes of the user's own
      are finite
    - counts of spec_info and prefix_cache_info lie between 0 and 2**53
    """
    if not isinstance(sample.status, SampleStatus):
        raise InvalidField("status", sample.status, "a Sample.Status")
    length = sample.response_length
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 0:
        raise InvalidField("response_length", length, "a whole number, at least 0")
    total = len(sample.array("tokens"))
    if length > total:
        raise _length("response_length", length, f"at most {total} (the length of tokens)")
    # A call for each field that is not set would take longer than the rest.
    values = vars(sample)
    for name, declared in sample.array_fields.items():
        array = values[name]
        if isinstance(array, list):
            array = sample.array(name)
        if array is not None:
            _check_array(name, array, declared, total, length)
    if values["rollout_top_p_token_ids"] is not None or values["rollout_top_p_token_offsets"] is not None:
        _check_nucleus(sample)
    end = 0
    for position, span in enumerate(sample.spans):
        if not end <= span.start <= span.end <= length:
            raise InvalidField(f"spans[{position}]", f"[{span.start}, {span.end})", f"a range within [{end}, {length}]")
        end = span.end
        # Versions of other models may have any form.
        if not span.model and span.weight_version:
            _check_version(f"spans[{position}].weight_version", span.weight_version)
    for position, version in enumerate(sample.weight_versions):
        _check_version(f"weight_versions[{position}]", version)
    declared_names = sample.__dataclass_fields__.keys()
    own = () if len(values) == len(declared_names) else values.keys() - declared_names
    for name in (*JSON_FIELDS, *own):
        value = values[name]
        if value and type(value) is not str:
            check_finite(name, value)
    for name in ("spec_info", "prefix_cache_info"):
        counts = vars(values[name])
        if any(counts.values()):
            for key, count in counts.items():
                if not 0 <= count <= MAX_COUNT:
                    raise InvalidField(f"{name}.{key}", count, f"a count, from 0 to {MAX_COUNT}")


def check_finite(field: str, value: Any) -> None:
    """Raises InvalidField with the path ("metadata.turns[3]") of the first NaN or infinity in a tree of JSON values."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_finite(f"{field}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            check_finite(f"{field}[{position}]", item)
    elif isinstance(value, (float, np.floating)) and not np.isfinite(value):
        raise InvalidField(field, float(value), "a finite number: JSON has no NaN and no Infinity")


def validate_finished(sample: Sample, *, reward_required: bool = True) -> None:
    """Checks the further rules for a sample of a group that is completed.

    Raises InvalidField for the first rule that `sample` breaks:

    - status is COMPLETED, TRUNCATED or FAILED
    - tokens hold a prompt and a response of at least one token each, unless `remove_sample` is set
    - reward is a finite number that float32 can hold, or a dict whose numbers are; it may be missing, or not finite,
      where the status is FAILED or `remove_sample` is set, and missing where `reward_required` is False
    """
    validate_sample(sample)
    if sample.status not in FINISHED:
        raise InvalidField(
            "status", sample.status.value, "completed, truncated or failed: an unfinished group is returned"
        )
    if not sample.remove_sample:
        if not sample.response_length:
            raise InvalidField(
                "response_length",
                0,
                "at least 1 response token, or remove_sample for a sample without",
                _no_response(sample),
            )
        total = len(sample.array("tokens"))
        if sample.response_length >= total:
            raise InvalidField(
                "response_length", sample.response_length,
                f"less than {total} (the length of tokens): tokens begin with the prompt",
            )  # fmt: skip
    if not (is_untrainable(sample) or sample.reward is None and not reward_required):
        _check_reward(sample.reward)
    if not abs(sample.non_generation_time) <= MOST_SECONDS:
        raise InvalidField(
            "non_generation_time", sample.non_generation_time, f"seconds, at most {MOST_SECONDS:.0f}: not a time of day"
        )


def validate_samples(samples: Sequence[Any], check: Callable[[Any], None]) -> None:
    """Calls `check` with each sample; prefixes the field of its InvalidField with `samples[POSITION]`."""
    for position, sample in enumerate(samples):
        try:
            check(sample)
        except InvalidField as error:
            raise of_sample(error, position) from None


def of_sample(error: InvalidField, position: int) -> InvalidField:
    """Returns the error of one sample as that of a list, in which it is at `position`."""
    prefix = f"samples[{position}]."
    return InvalidField(prefix + error.field, error.value, error.expected, prefix + error.message)


def is_untrainable(sample: Sample) -> bool:
    """Returns whether the sample is never trained on, whatever its other fields hold."""
    return sample.remove_sample or sample.status is SampleStatus.FAILED


def reward_is_finite(reward: Any) -> bool:
    """Tells whether `reward` is a finite number, or a dict of JSON values whose numbers are."""
    try:
        _check_reward(reward)
    except InvalidField:
        return False
    return True


def version_number(version: str) -> int | None:
    """Returns the number of a weight version; None if it has none ("default")."""
    # int() alone would accept digits of other scripts, and fails for thousands of digits.
    if version.isascii() and version.isdecimal() and len(version) <= 19 and int(version) <= MAX_VERSION:
        return int(version)
    return None


def _check_version(field: str, version: Any) -> None:
    if not isinstance(version, str) or version != NO_VERSION and version_number(version) is None:
        raise InvalidField(field, version, f'a weight version: a whole number as text, or "{NO_VERSION}"')


def _check_reward(reward: Any) -> None:
    if type(reward) is float and -MAX_REWARD <= reward <= MAX_REWARD:
        return  # by far the most rewards
    expected = "a finite number"
    if not isinstance(reward, (numbers.Real, np.bool_, dict)):
        raise InvalidField("reward", reward, f"{expected}, or a dict of them")
    pending: list[tuple[str, Any]] = [("reward", reward)]
    while pending:
        field, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{field}.{key}", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(f"{field}[{position}]", item) for position, item in enumerate(value)]
        elif isinstance(value, numbers.Real) and not -MAX_REWARD <= value <= MAX_REWARD:  # type: ignore[operator]
            raise InvalidField(field, value, f"{expected} of float32")


def _check_array(name: str, array: np.ndarray, declared: ArrayField, length: int, response_length: int) -> None:
    """Checks an array against the declaration of its field."""
    if array.ndim != declared.ndim:
        raise InvalidField(name, array.shape, counted(declared.ndim, "dimension"))
    rows = declared.expected_rows(length, response_length)
    if rows is not None and len(array) != rows:
        reasons = {
            RowCount.RESPONSE: "response_length",
            RowCount.BOUNDS: f"response_length {response_length} + 1",
            RowCount.PAIRS: "the length of tokens, less 1",
        }
        raise _length(name, len(array), f"{rows} ({reasons[declared.rows]})")
    if declared.check is not None and array.size:
        declared.check(name, array)


def check_token_ids(field: str, ids: np.ndarray) -> None:
    # The place of the least is found several times faster than the least itself: no ufunc has to be set up.
    if ids.item(ids.argmin()) < 0:
        position = int(np.argmax(np.asarray(ids) < 0))
        raise InvalidField(f"{field}[{position}]", int(ids[position]), "a token id, at least 0")


def check_mask(field: str, mask: np.ndarray) -> None:
    if mask.item(mask.argmax()) > 1:
        raise InvalidField(field, int(mask.max()), "0 or 1 for each token")


def check_log_probs(field: str, log_probs: np.ndarray) -> None:
    # The least and the largest of an array with a NaN are NaN, which fails both comparisons.
    least, largest = log_probs.item(log_probs.argmin()), log_probs.item(log_probs.argmax())
    if least >= LEAST_LOG_PROB and largest <= LOG_PROB_ROUNDING:
        return
    values = np.asarray(log_probs)
    position = int(np.argmax(~((values >= LEAST_LOG_PROB) & (values <= LOG_PROB_ROUNDING))))
    raise InvalidField(f"{field}[{position}]", float(values[position]), f"a log-prob from {LEAST_LOG_PROB:.0f} to 0")


def _no_response(sample: Sample) -> str:
    got = "no tokens" if not len(sample.array("tokens")) else "no response tokens"
    if sample.response:
        got += f" for a response of {counted(len(sample.response), 'character')}"
    return f"response_length: got {got}, expected at least 1 response token; set remove_sample for a sample without"


def _check_nucleus(sample: Sample) -> None:
    ids, offsets = sample.array("rollout_top_p_token_ids"), sample.array("rollout_top_p_token_offsets")
    if ids is None or offsets is None:
        missing = "rollout_top_p_token_ids" if ids is None else "rollout_top_p_token_offsets"
        raise InvalidField(missing, None, "an array, as the other of the two rollout_top_p fields is given")
    if offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise InvalidField("rollout_top_p_token_offsets", offsets.tolist(), "offsets that start at 0 and never fall")
    if offsets[-1] != len(ids):
        raise _length(
            "rollout_top_p_token_ids", len(ids), f"{int(offsets[-1])} (the last of rollout_top_p_token_offsets)"
        )


def _length(field: str, length: int, expected: str) -> InvalidField:
    return InvalidField(field, length, expected, f"{field}: got length {length}, expected {expected}")
