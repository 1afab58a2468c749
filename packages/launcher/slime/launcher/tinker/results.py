"""Encodes results of passes and samples as the protobuf messages that the SDK reads."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime.launcher.tinker import messages
from slime.types.errors import EngineError


def encode_pass(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encodes the result of a pass. log_probs: float32 [N] of each datum."""
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(log_probs))
    values = record.fields["logprobs"]
    values.dtype = messages.FLOAT32
    values.data = np.concatenate(log_probs).astype("<f4").tobytes()
    ends = itertools.accumulate((4 * len(each) for each in log_probs), initial=0)
    values.offsets = np.fromiter(ends, dtype="<i8").tobytes()
    for name, value in metrics.items():
        output.metrics[name] = value
    return bytes(output.SerializeToString())


def encode_samples(answers: Sequence[Mapping[str, Any]], prompt: Sequence[float | None] | None) -> bytes:
    """Encodes the result of sampling. answers: the engine's. prompt: log-probs of the prompt's tokens; the first has
    none. Raises EngineError."""
    response = messages.SampleResponse()
    for answer in answers:
        meta = answer["meta_info"]
        reason = (meta.get("finish_reason") or {}).get("type")
        if reason not in ("stop", "length"):
            raise EngineError(f"the engine ended a sample with {reason!r}", field="finish_reason", value=reason)
        pairs = meta["output_token_logprobs"]
        response.sequences.add(
            stop_reason=messages.STOPPED if reason == "stop" else messages.LENGTH,
            tokens=np.array([token for _, token, _ in pairs], dtype="<i4").tobytes(),
            logprobs=np.array([value for value, _, _ in pairs], dtype="<f4").tobytes(),
        )
    if prompt is not None:
        known = [np.nan if value is None else value for value in prompt]
        response.prompt_logprobs = np.array(known, dtype="<f4").tobytes()
    return bytes(response.SerializeToString())
