"""Finished samples are accepted, and no sample with one invalid field is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slime.types import Sample, TokenSpan
from slime.types.codec import sample_from_proto, sample_to_proto
from slime.types.errors import InvalidField
from slime.types.sample.validate import (
    LEAST_LOG_PROB,
    LOG_PROB_ROUNDING,
    check_log_probs,
    check_mask,
    check_token_ids,
    validate_finished,
    validate_sample,
    validate_samples,
    version_number,
)
from slime.v1 import sample_pb2, tensor_pb2

finite = st.floats(-1e6, 1e6)
versions = st.integers(0, 2**63 - 1).map(str) | st.just("default")


@st.composite
def finished(draw: st.DrawFn) -> Sample:
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    ids = st.integers(0, 2**31 - 1)
    log_probs = hnp.arrays(np.float32, response, elements=st.floats(-100, 0, width=32))
    sizes = draw(hnp.arrays(np.int64, response, elements=st.integers(0, 3)))
    return Sample(
        group_index=0,
        index=draw(st.integers(0, 9)),
        prompt=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        tokens=draw(hnp.arrays(np.int32, prompt + response, elements=ids)),
        response_length=response,
        loss_mask=draw(st.none() | hnp.arrays(np.uint8, response, elements=st.integers(0, 1))),
        rollout_log_probs=draw(log_probs),
        teacher_log_probs=draw(st.none() | log_probs),
        rollout_top_p_token_offsets=np.concatenate([[0], np.cumsum(sizes)]),
        rollout_top_p_token_ids=draw(hnp.arrays(np.int32, int(sizes.sum()), elements=ids)),
        rollout_routed_experts=np.zeros((prompt + response - 1, 2, 1), np.int32),
        reward=draw(finite | st.integers(-(2**70), 2**70) | st.booleans() | st.dictionaries(st.text(), finite)),
        status=draw(st.sampled_from([Sample.Status.COMPLETED, Sample.Status.TRUNCATED])),
        weight_versions=draw(st.lists(versions, max_size=2)),
        spans=[TokenSpan(0, response, "", draw(versions)), TokenSpan(response, response, "teacher", "v2-beta")],
    )


def _sample(**changes: Any) -> Sample:
    values = dict(tokens=[1, 2, 3], response_length=2, reward=1.0, status=Sample.Status.COMPLETED)
    return Sample(**values | changes)


def _set(name: str, value: Any) -> Callable[[Sample], None]:
    # Bypasses the conversions of the class, as a message can.
    return lambda sample: sample.__dict__.__setitem__(name, value)


def _at(name: str, value: Any) -> Callable[[Sample], None]:
    def change(sample: Sample) -> None:
        changed = np.array(sample.__dict__[name])
        changed[-1] = value
        sample.__dict__[name] = changed

    return change


def _cut(name: str) -> Callable[[Sample], None]:
    return lambda sample: sample.__dict__.__setitem__(name, sample.__dict__[name][:-1])


MUTATIONS: dict[str, tuple[str, Callable[[Sample], None]]] = {
    **{f"reward {value}": ("reward", _set("reward", value)) for value in (math.nan, math.inf, -math.inf, 1e300, "1")},
    "no reward": ("reward", _set("reward", None)),
    "a list of rewards": ("reward", _set("reward", [1.0])),
    "reward below": ("reward.a.b[1]", _set("reward", {"a": {"b": [1, math.nan]}})),
    **{
        f"{name} {value}": (name, _at(name, value))
        for name in ("rollout_log_probs", "teacher_log_probs")
        for value in (math.nan, math.inf, -math.inf, 0.01, 100, -3e38)
    },
    "a negative token": ("tokens", _at("tokens", -1)),
    "a negative nucleus": ("rollout_top_p_token_ids", _at("rollout_top_p_token_ids", -7)),
    "pending": ("status", _set("status", Sample.Status.PENDING)),
    "aborted": ("status", _set("status", Sample.Status.ABORTED)),
    "no status": ("status", _set("status", "completed")),
    "no tokens": ("response_length", _set("tokens", np.empty(0, np.int32))),
    "an empty response": (
        "response_length",
        lambda sample: sample.__dict__.update(_sample(response_length=0).__dict__),
    ),
    "no prompt": ("response_length", lambda sample: sample.__dict__.update(_sample(tokens=[1, 2]).__dict__)),
    "a negative response": ("response_length", _set("response_length", -1)),
    "a fraction of a token": ("response_length", _set("response_length", 1.5)),
    "a long response": ("response_length", _set("response_length", 1000)),
    "a mask of 2": ("loss_mask", _at("loss_mask", 2)),
    "falling offsets": ("rollout_top_p_token_offsets", _at("rollout_top_p_token_offsets", -1)),
    "no offsets": ("rollout_top_p_token_offsets", _set("rollout_top_p_token_offsets", None)),
    "flat experts": ("rollout_routed_experts", _set("rollout_routed_experts", np.zeros(3, np.int32))),
    "a span outside": ("spans[0]", _set("spans", [TokenSpan(0, 1000)])),
    **{
        f"version {value[:9]!r}": ("weight_versions[1]", _set("weight_versions", ["3", value]))
        for value in ("", "abc", "-1", "1.0", "1" * 20, "9" * 5000, "٣", " 1")
    },
    "no version": ("spans[0].weight_version", _set("spans", [TokenSpan(0, 1, "", "abc")])),
    "endless tools": ("non_generation_time", _set("non_generation_time", math.inf)),
    "a label of NaN": ("label", _set("label", math.nan)),
    "an infinite label": ("label.a[1]", _set("label", {"a": [1, -math.inf]})),
    "metadata of NaN": ("metadata.turns[1].score", _set("metadata", {"turns": [1, {"score": np.float32("nan")}]})),
    "a turn of NaN": ("prompt[0].seconds", _set("prompt", [{"role": "user", "seconds": math.inf}])),
    "an attribute of NaN": ("judged[0]", _set("judged", [math.nan])),
    "a negative count": ("spec_info.spec_verify_ct", _set("spec_info", Sample.SpecInfo(1, 2, -3))),
    "a count beyond floats": (
        "prefix_cache_info.cached_tokens",
        _set("prefix_cache_info", Sample.PrefixCacheInfo(2**53 + 1)),
    ),
    "tools as long as a time of day": ("non_generation_time", _set("non_generation_time", 1.7e9)),
    **{f"short {name}": (name, _cut(name)) for name in ("loss_mask", "rollout_log_probs", "rollout_routed_experts")},
}


@settings(max_examples=60, deadline=None)
@given(finished())
def test_a_finished_sample_passes_here_and_behind_the_wire(sample: Sample) -> None:
    validate_finished(sample)
    message = sample_to_proto(sample)
    validate_finished(sample_from_proto(message, check_types=True))


@settings(max_examples=150, deadline=None)
@given(finished(), st.sampled_from(sorted(MUTATIONS)))
def test_one_wrong_field_is_refused_by_its_name(sample: Sample, mutation: str) -> None:
    if sample.loss_mask is None:
        sample.loss_mask = np.ones(sample.response_length)
    if sample.teacher_log_probs is None:
        sample.teacher_log_probs = np.zeros(sample.response_length)
    if not len(sample.rollout_top_p_token_ids):  # type: ignore[arg-type]
        sample.rollout_top_p_token_ids = np.zeros(1, np.int32)
        sample.rollout_top_p_token_offsets = np.array([0, *[1] * sample.response_length])
    field, change = MUTATIONS[mutation]
    change(sample)
    with pytest.raises(InvalidField) as error:
        validate_samples([Sample(remove_sample=True, status=Sample.Status.COMPLETED), sample], validate_finished)
    assert error.value.field.startswith(f"samples[1].{field}")
    assert error.value.message.startswith(f"samples[1].{field}") and error.value.expected


def test_the_place_and_the_value_are_named() -> None:
    with pytest.raises(InvalidField, match=r"^tokens\[1\]: got -5, expected a token id, at least 0$"):
        validate_finished(_sample(tokens=[1, -5, -6]))
    with pytest.raises(InvalidField, match=r"^rollout_log_probs\[1\]: got nan, expected a log-prob from -1000000 to"):
        validate_finished(_sample(rollout_log_probs=[-1, math.nan]))


def test_the_rounding_error_of_a_log_softmax_is_no_error() -> None:
    validate_finished(_sample(rollout_log_probs=[2.4e-7, -1]))


@pytest.mark.parametrize("kept", [dict(status=Sample.Status.FAILED), dict(remove_sample=True)])
@pytest.mark.parametrize("reward", [None, math.nan])
def test_a_failed_or_removed_sample_needs_no_reward(kept: dict[str, Any], reward: Any) -> None:
    validate_finished(_sample(reward=reward, **kept))


def test_a_reward_may_be_missing_where_the_loss_needs_none() -> None:
    validate_finished(_sample(reward=None), reward_required=False)
    with pytest.raises(InvalidField, match="reward: got nan"):
        validate_finished(_sample(reward=math.nan), reward_required=False)


def test_a_removed_sample_may_be_empty_and_must_be_finished() -> None:
    validate_finished(Sample(remove_sample=True, status=Sample.Status.TRUNCATED))
    with pytest.raises(InvalidField, match="status"):
        validate_finished(Sample(remove_sample=True))


def test_an_unfinished_sample_may_lack_what_only_a_finished_one_has() -> None:
    validate_sample(Sample())
    validate_sample(_sample(reward=None, status=Sample.Status.ABORTED))
    with pytest.raises(InvalidField, match="tokens"):
        validate_sample(_sample(tokens=[-1, 2, 3]))


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("tokens", tensor_pb2.DATA_TYPE_FLOAT32, "an integer"),
        ("tokens", tensor_pb2.DATA_TYPE_BOOL, "an integer"),
        ("loss_mask", tensor_pb2.DATA_TYPE_FLOAT64, "an integer"),
        ("rollout_log_probs", tensor_pb2.DATA_TYPE_INT32, "a float"),
        ("rollout_log_probs", tensor_pb2.DATA_TYPE_BFLOAT16, "a float"),
        ("rollout_top_p_token_offsets", 99, "an integer"),
    ],
)
def test_a_kind_of_number_that_would_be_converted_is_refused(name: str, dtype: Any, kind: str) -> None:
    message = sample_pb2.Sample()
    getattr(message, name).dtype = dtype
    with pytest.raises(InvalidField, match=rf"{name}\.dtype: .* expected {kind} DataType"):
        sample_from_proto(message, check_types=True)


def test_the_number_of_a_version() -> None:
    assert [version_number(v) for v in ("0", "17", "default", "", "-1", "9" * 19, str(2**63 - 1))] == [
        0, 17, None, None, None, None, 2**63 - 1,
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [[1] * 65, [0, 2**62], [0, 2**40, 2**40]])
def test_an_impossible_shape_is_refused(shape: list[int]) -> None:
    data = bytes(4) if 0 not in shape else b""
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT32, shape=shape, inline=data)
    with pytest.raises(InvalidField, match=r"tokens\.shape"):
        sample_from_proto(sample_pb2.Sample(tokens=tensor))


@settings(max_examples=200)
@given(st.data(), st.sampled_from(["tokens", "loss_mask", "rollout_log_probs"]), st.booleans())
def test_an_array_is_refused_at_its_first_value_out_of_range(data: st.DataObject, name: str, strided: bool) -> None:
    elements, check, is_valid = {
        "tokens": (hnp.from_dtype(np.dtype(np.int32)) | st.just(0), check_token_ids, lambda value: value >= 0),
        "loss_mask": (st.sampled_from([0, 1, 2, 255]), check_mask, lambda value: value <= 1),
        "rollout_log_probs": (
            st.floats(width=32) | st.sampled_from([0.0, -1e6, -0.5, np.float32(1e-4).item(), math.nan]),
            check_log_probs,
            lambda value: LEAST_LOG_PROB <= value <= LOG_PROB_ROUNDING,
        ),
    }[name]
    array = data.draw(hnp.arrays(Sample.array_fields[name].dtype, st.integers(1, 12), elements=elements))
    if strided:
        array = np.repeat(array, 2)[::2]
    wrong = [position for position, value in enumerate(array.tolist()) if not is_valid(value)]
    if not wrong:
        check(name, array)
        return
    with pytest.raises(InvalidField) as raised:
        check(name, array)
    assert raised.value.field in (name, f"{name}[{wrong[0]}]")
