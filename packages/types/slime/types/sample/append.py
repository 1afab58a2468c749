"""Appends response tokens, and an engine's information about them, to a sample.

The engine's `meta_info` has SGLang's keys: `weight_version`, `finish_reason`, counts of cached and drafted tokens, and,
as base64 of little-endian int32 or as lists, the nucleus of each new token and the experts that each token of the
sequence was routed to.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.types.errors import InvalidField, counted
from slime.types.sample import arrays
from slime.types.sample.fields import RowCount
from slime.types.sample.parts import TokenSpan
from slime.types.sample.status import SampleStatus

if TYPE_CHECKING:
    from slime.types.sample.sample import Sample

_FINISHED = {"length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED, "stop": SampleStatus.COMPLETED}
_NUCLEUS_IDS = ("top_p_token_ids", "top_p_kept_token_ids")
_NUCLEUS_OFFSETS = ("top_p_token_offsets", "top_p_kept_token_offsets")


def append_response_tokens(
    sample: Sample,
    args: Any,
    tokens: Any,
    log_probs: Any,
    *,
    trainable: bool,
    meta_info: Mapping[str, Any] | None,
    text: str | None,
    update_terminal_info: bool,
) -> None:
    """Implements `Sample.append_response_tokens`."""
    new_tokens = np.empty(0, np.int32) if tokens is None else arrays.convert("tokens", tokens, np.int32)
    count, before = len(new_tokens), sample.response_length
    new_log_probs = _log_probs(sample, log_probs, count, trainable)
    changes: dict[str, Any] = {}
    if count:
        changes["tokens"] = np.concatenate((sample.array("tokens"), new_tokens))
        changes["response_length"] = before + count
        mask = sample.array("loss_mask")
        mask = np.ones(before, np.uint8) if mask is None else mask
        changes["loss_mask"] = np.concatenate((mask, np.full(count, trainable, np.uint8)))
    if new_log_probs is not None:
        earlier = sample.array("rollout_log_probs")
        earlier = np.zeros(before, np.float32) if earlier is None else earlier
        changes["rollout_log_probs"] = np.concatenate((earlier, new_log_probs))
    if count:
        changes |= _filled(sample, count)
        changes |= _nucleus(sample, meta_info or {}, count, trainable)
    changes |= _experts(sample, args, meta_info or {}, len(sample.array("tokens")) + count)
    _check_lengths(sample, before + count, changes)

    for name, value in changes.items():
        setattr(sample, name, value)
    if text is not None:
        sample.response += text
    if meta_info is not None:
        apply_request_info(sample, args, meta_info, update_terminal_info=update_terminal_info)
        if trainable and count and meta_info.get("weight_version") is not None:
            _add_span(sample, before, before + count, str(meta_info.get("model", "")), str(meta_info["weight_version"]))


def apply_request_info(sample: Sample, args: Any, meta_info: Mapping[str, Any], *, update_terminal_info: bool) -> None:
    """Adds the weight version and counts of one request, and its finish reason if `update_terminal_info`."""
    if getattr(args, "sglang_speculative_algorithm", None):
        sample.spec_info.add(meta_info)
    sample.prefix_cache_info.add(meta_info)
    if meta_info.get("weight_version") is not None:
        sample.weight_versions.append(str(meta_info["weight_version"]))
    if update_terminal_info:
        reason = meta_info.get("finish_reason")
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        # Engines add reasons over time; an unknown one leaves the status unchanged.
        sample.status = _FINISHED.get(kind, sample.status) if isinstance(kind, str) else sample.status


def _log_probs(sample: Sample, log_probs: Any, count: int, trainable: bool) -> np.ndarray | None:
    if not trainable:
        if log_probs is not None and count:
            raise InvalidField("log_probs", log_probs, "None for tokens that are not trainable")
        return np.zeros(count, np.float32) if count else None
    if log_probs is None:
        if count:
            raise InvalidField("log_probs", None, f"{counted(count, 'log-prob')} for as many trainable tokens")
        return None
    new = arrays.convert("log_probs", log_probs, np.float32)
    if len(new) != count:
        raise InvalidField(
            "log_probs", len(new), str(count), f"log_probs: got length {len(new)}, expected {count} (tokens)"
        )
    if count and sample.response_length and sample.array("rollout_log_probs") is None:
        raise InvalidField(
            "rollout_log_probs", None, f"the log-probs of the {sample.response_length} response tokens before these"
        )
    return new


def _nucleus(sample: Sample, meta_info: Mapping[str, Any], count: int, trainable: bool) -> dict[str, Any]:
    """Returns the rollout_top_p fields with `count` more tokens; tokens of a tool have an empty nucleus."""
    ids, offsets = _decode(meta_info, _NUCLEUS_IDS), _decode(meta_info, _NUCLEUS_OFFSETS)
    old_offsets = sample.array("rollout_top_p_token_offsets")
    if ids is None and offsets is None:
        if trainable or old_offsets is None:
            return {}
        ids, offsets = np.empty(0, np.int32), np.zeros(count + 1, np.int64)
    if ids is None or offsets is None:
        raise InvalidField(
            "meta_info." + (_NUCLEUS_IDS if ids is None else _NUCLEUS_OFFSETS)[0],
            None,
            "an array: ids and offsets of a nucleus come together",
        )
    if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        raise InvalidField(
            "meta_info." + _NUCLEUS_OFFSETS[0], offsets.tolist(), f"{counted(count + 1, 'offset')} from 0 to {len(ids)}"
        )
    old_ids = sample.array("rollout_top_p_token_ids")
    if old_offsets is None or old_ids is None:
        # The earlier tokens came from a tool and have an empty nucleus.
        old_offsets, old_ids = np.zeros(sample.response_length + 1, np.int64), np.empty(0, np.int32)
    return {
        "rollout_top_p_token_ids": np.concatenate((old_ids, ids)),
        "rollout_top_p_token_offsets": np.concatenate((old_offsets, offsets[1:].astype(np.int64) + old_offsets[-1])),
    }


def _experts(sample: Sample, args: Any, meta_info: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Returns rollout_routed_experts [length - 1, layers, top_k]; new rows start at `routed_experts_start_len`.

    Tokens that no engine has read yet have experts -1.
    """
    flat = _decode(meta_info, ("routed_experts",))
    known = sample.rollout_routed_experts
    if flat is None and known is not None:
        unread = np.full((max(0, length - 1 - len(known)), *known.shape[1:]), -1, np.int32)
        return {"rollout_routed_experts": np.concatenate((known, unread))} if len(unread) else {}
    if flat is None:
        return {}
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if layers is None or top_k is None:
        raise InvalidField("args", None, "num_layers and moe_router_topk, to read meta_info.routed_experts")
    start = int(meta_info.get("routed_experts_start_len") or 0)
    rows = max(0, length - 1 - start)
    if start < 0 or flat.size != rows * layers * top_k:
        expected = f"{rows} x {layers} x {top_k} (tokens from {start}, layers, top-k)"
        raise InvalidField("meta_info.routed_experts", flat.size, expected)
    new = flat.reshape(rows, layers, top_k)
    if start:
        earlier = sample.rollout_routed_experts
        if earlier is None or len(earlier) < start or earlier.shape[1:] != new.shape[1:]:
            have = None if earlier is None else earlier.shape
            raise InvalidField("rollout_routed_experts", have, f"at least {start} rows of {layers} x {top_k}")
        new = np.concatenate((earlier[:start].astype(np.int32), new))
    return {"rollout_routed_experts": new}


def _decode(meta_info: Mapping[str, Any], names: tuple[str, ...]) -> np.ndarray | None:
    """Returns the int32 array of `meta_info` under the first of `names` that it has; None if it has none."""
    for name in names:
        value = meta_info.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            try:
                value = base64.b64decode(value, validate=True)
            except binascii.Error:
                raise InvalidField(f"meta_info.{name}", value, "base64 of int32 values") from None
        if isinstance(value, (bytes, bytearray)):
            if len(value) % 4:
                raise InvalidField(f"meta_info.{name}", f"{len(value)} bytes", "a multiple of 4 bytes")
            return np.frombuffer(value, "<i4")
        return arrays.convert(f"meta_info.{name}", np.asarray(value).reshape(-1), np.int32)
    return None


def _filled(sample: Sample, count: int) -> dict[str, Any]:
    """Returns the arrays of fields with a `fill`, with that value for the new tokens."""
    filled: dict[str, Any] = {}
    for name, declared in sample.array_fields.items():
        if declared.fill is not None and (array := sample.array(name)) is not None:
            filled[name] = np.concatenate((array, np.full(count, declared.fill, declared.dtype)))
    return filled


def _check_lengths(sample: Sample, length: int, changes: Mapping[str, Any]) -> None:
    for name, declared in sample.array_fields.items():
        if declared.rows not in (RowCount.RESPONSE, RowCount.BOUNDS):
            continue
        array = changes[name] if name in changes else sample.array(name)
        expected = declared.expected_rows(0, length)
        if array is not None and len(array) != expected:
            raise InvalidField(name, len(array), str(expected), f"{name}: got length {len(array)}, expected {expected}")


def _add_span(sample: Sample, start: int, end: int, model: str, weight_version: str) -> None:
    last = sample.spans[-1] if sample.spans else None
    if last is not None and last.end == start and (last.model, last.weight_version) == (model, weight_version):
        last.end = end
    else:
        sample.spans.append(TokenSpan(start, end, model, weight_version))
