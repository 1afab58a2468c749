"""What must hold between the fields of a sample that is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slime.types.errors import InvalidField
from slime.types.status import SampleStatus

if TYPE_CHECKING:
    from slime.types.sample import Sample


def validate_sample(sample: Sample) -> None:
    """Raises InvalidField for the first rule that `sample` breaks.

    - 0 <= response_length <= len(tokens)
    - loss_mask, rollout_log_probs, teacher_log_probs: None or [response_length]; a mask holds 0 and 1
    - rollout_top_p_*: both or none; offsets [response_length + 1], from 0, never falling, up to len(ids)
    - rollout_routed_experts: None or [len(tokens) - 1, layers, top_k]
    - spans lie in the response, in order, without overlap
    """
    if not isinstance(sample.status, SampleStatus):
        raise InvalidField("status", sample.status, "a Sample.Status")
    length = sample.response_length
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 0:
        raise InvalidField("response_length", length, "a whole number, at least 0")
    total = len(sample.array("tokens"))
    if length > total:
        raise _length("response_length", length, f"at most {total} (the length of tokens)")
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        array = sample.array(name)
        if array is not None and len(array) != length:
            raise _length(name, len(array), f"{length} (response_length)")
    mask = sample.array("loss_mask")
    if mask is not None and length and mask.max() > 1:
        raise InvalidField("loss_mask", int(mask.max()), "0 or 1 for each token")
    _check_nucleus(sample)
    experts = sample.rollout_routed_experts
    if experts is not None:
        rows = max(0, total - 1)
        if experts.ndim != 3:
            raise InvalidField(
                "rollout_routed_experts", experts.shape, "three dimensions: [len(tokens) - 1, layers, top_k]"
            )
        if len(experts) != rows:
            raise _length("rollout_routed_experts", len(experts), f"{rows} (the length of tokens, less 1)")
    end = 0
    for position, span in enumerate(sample.spans):
        if not end <= span.start <= span.end <= length:
            raise InvalidField(f"spans[{position}]", f"[{span.start}, {span.end})", f"a range within [{end}, {length}]")
        end = span.end


def _check_nucleus(sample: Sample) -> None:
    ids, offsets = sample.array("rollout_top_p_token_ids"), sample.array("rollout_top_p_token_offsets")
    if ids is None and offsets is None:
        return
    if ids is None or offsets is None:
        missing = "rollout_top_p_token_ids" if ids is None else "rollout_top_p_token_offsets"
        raise InvalidField(missing, None, "an array, as the other of the two rollout_top_p fields is given")
    if len(offsets) != sample.response_length + 1:
        raise _length(
            "rollout_top_p_token_offsets",
            len(offsets),
            f"{sample.response_length + 1} (response_length {sample.response_length} + 1)",
        )
    if offsets[0] != 0 or np.any(np.diff(offsets) < 0):
        raise InvalidField("rollout_top_p_token_offsets", offsets.tolist(), "offsets that start at 0 and never fall")
    if offsets[-1] != len(ids):
        raise _length(
            "rollout_top_p_token_ids", len(ids), f"{int(offsets[-1])} (the last of rollout_top_p_token_offsets)"
        )


def _length(field: str, length: int, expected: str) -> InvalidField:
    return InvalidField(field, length, expected, f"{field}: got length {length}, expected {expected}")
