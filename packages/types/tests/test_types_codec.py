"""Samples, tensors and values survive the wire; errors name what cannot travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from slime.types import PrefixCacheInfo, Sample, SampleGroup, SpecInfo, TokenSpan
from slime.types.codec import (
    decode_sample,
    encode_sample,
    group_from_proto,
    group_to_proto,
    sample_from_proto,
    sample_to_proto,
)  # fmt: skip
from slime.types.errors import InvalidField
from slime.types.wire.tensor import fill_value, tensor_from_proto, tensor_to_proto, value_from_proto
from slime.v1 import sample_pb2, tensor_pb2

DTYPES = ("?", "u1", "i1", "<u2", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8")
int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
json_objects = st.dictionaries(text, json_values, max_size=3)
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
trees = st.recursive(
    st.none() | st.booleans() | int64 | st.floats() | text | st.binary(max_size=8) | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sample whose per-token fields have matching lengths."""
    response, prompt = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    floats = hnp.arrays(np.float32, response)
    sample = Sample(
        group_index=draw(optional(int64)),
        index=draw(optional(int64)),
        rollout_id=draw(optional(int64)),
        prompt=draw(text | st.lists(json_objects, max_size=2)),
        tokens=draw(hnp.arrays(np.int32, prompt + response)),
        multimodal_inputs=draw(optional(st.dictionaries(text, trees, max_size=2))),
        multimodal_train_inputs=draw(optional(st.dictionaries(text, trees, max_size=2))),
        multimodal_train_input_id=draw(optional(text)),
        apply_chat_template_kwargs=draw(json_objects),
        response=draw(text),
        response_length=response,
        label=draw(json_values),
        reward=draw(optional(st.floats() | json_objects | st.integers(-(2**70), 2**70))),
        loss_mask=draw(optional(hnp.arrays(np.uint8, response, elements=st.integers(0, 1)))),
        weight_versions=draw(st.lists(text, max_size=2)),
        rollout_log_probs=draw(optional(floats)),
        teacher_log_probs=draw(optional(floats)),
        remove_sample=draw(st.booleans()),
        status=draw(st.sampled_from(list(Sample.Status))),
        metadata=draw(json_objects),
        generate_function_path=draw(optional(text)),
        custom_rm_path=draw(optional(text)),
        train_metadata=draw(optional(json_objects)),
        session_id=draw(optional(text)),
        non_generation_time=draw(st.floats()),
        spec_info=SpecInfo(*draw(st.tuples(int64, int64, int64, int64))),
        prefix_cache_info=PrefixCacheInfo(*draw(st.tuples(int64, int64))),
    )
    if draw(st.booleans()):
        sizes = draw(hnp.arrays(np.int64, response, elements=st.integers(0, 3)))
        sample.rollout_top_p_token_offsets = np.concatenate([[0], np.cumsum(sizes)])
        sample.rollout_top_p_token_ids = draw(hnp.arrays(np.int32, int(sizes.sum())))
    if draw(st.booleans()):
        dtype = draw(st.sampled_from(("u1", "<i2", "<i4", "<i8")))
        sample.rollout_routed_experts = draw(hnp.arrays(dtype, (max(0, prompt + response - 1), 2, 1)))
    if response and draw(st.booleans()):
        sample.spans = [TokenSpan(0, 1, draw(text), draw(text)), TokenSpan(1, response, "", "")]
    for name in draw(st.lists(st.sampled_from(("colour", "round_number")), unique=True)):
        setattr(sample, name, draw(json_values))
    return sample


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(samples())
def test_any_valid_sample_survives_the_trip(sample: Sample) -> None:
    back = decode_sample(encode_sample(sample))
    assert back == sample
    assert back.__dict__.keys() == sample.__dict__.keys()
    assert decode_sample(encode_sample(sample), copy=False) == sample
    assert sample_from_proto(sample_to_proto(sample)) == sample


def test_none_and_empty_are_two_things() -> None:
    empty = Sample(
        loss_mask=[],
        rollout_log_probs=[],
        teacher_log_probs=[],
        rollout_top_p_token_ids=[],
        train_metadata={},
        session_id="",
        multimodal_inputs={},
        label="",
        reward={},
        prompt=[],
        rollout_routed_experts=np.zeros((0, 2, 8), np.uint8),
    )
    for sample in (empty, Sample()):
        back = decode_sample(encode_sample(sample))
        assert back == sample
        for name, value in sample.to_dict().items():
            assert (getattr(back, name) is None) == (value is None), name
    assert decode_sample(encode_sample(empty)).rollout_routed_experts.shape == (0, 2, 8)
    assert decode_sample(b"") == Sample()


def test_numpy_scalars_and_tuples_become_plain() -> None:
    sample = Sample(
        reward=np.float32(0.5),
        metadata={"a": np.int64(3), "b": (1, np.bool_(True))},
        index=np.int64(4),
        remove_sample=np.bool_(True),
    )
    back = decode_sample(encode_sample(sample))
    assert (back.reward, back.metadata, back.index, back.remove_sample) == (0.5, {"a": 3, "b": [1, True]}, 4, True)
    assert type(back.metadata["b"][1]) is bool and type(back.reward) is float
    assert decode_sample(encode_sample(Sample(reward=1))).reward == 1
    for reward in (2**60 + 1, -(10**400)):
        assert decode_sample(encode_sample(Sample(reward=reward))).reward == reward


@pytest.mark.parametrize("size", [1, 31, 32, 127, 128, 4096, 70_000, 600_000])
def test_the_quick_encoding_is_that_of_the_message(size: int) -> None:
    sample = Sample(
        tokens=range(size), loss_mask=np.ones(size), rollout_log_probs=np.arange(size) / 3, response="r", index=3
    )
    assert sample_pb2.Sample.FromString(encode_sample(sample)) == sample_to_proto(sample)
    sample.tokens = sample.array("tokens")[::2]
    assert sample_pb2.Sample.FromString(encode_sample(sample)) == sample_to_proto(sample)
    assert decode_sample(encode_sample(sample)) == sample


def test_decoded_arrays_are_the_samples_own_unless_asked() -> None:
    data = encode_sample(Sample(tokens=[1, 2]))
    sample = decode_sample(data)
    sample.array("tokens")[0] = 5
    assert decode_sample(data).tokens == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        decode_sample(data, copy=False).array("tokens")[0] = 5


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (dict(metadata={"a": [{"b": object()}]}), "metadata.a[0].b"),
        (dict(metadata={"a": {3: 1}}), "metadata.a"),
        (dict(metadata={"a": np.zeros(2)}), "metadata.a"),
        (dict(metadata=None), "metadata"),
        (dict(metadata=[1]), "metadata"),
        (dict(train_metadata=3), "train_metadata"),
        (dict(reward=object()), "reward"),
        (dict(reward=np.zeros(3)), "reward"),
        (dict(label={1, 2}), "label"),
        (dict(prompt=None), "prompt"),
        (dict(prompt=["a"]), "prompt[0]"),
        (dict(prompt=[{"content": b"x"}]), "prompt[0].content"),
        (dict(prompt="\ud800"), "prompt"),
        (dict(response="\ud800"), "response"),
        (dict(response=None), "response"),
        (dict(response_length=1.5), "response_length"),
        (dict(index="a"), "index"),
        (dict(index=2**63), "index"),
        (dict(status="completed"), "status"),
        (dict(weight_versions=[1]), "weight_versions[0]"),
        (dict(spans=[TokenSpan(0, "x")]), "spans[0].end"),  # type: ignore[arg-type]
        (dict(multimodal_inputs={"a": [object()]}), "multimodal_inputs.a[0]"),
        (dict(multimodal_inputs={"a": {1: 2}}), "multimodal_inputs.a"),
        (dict(multimodal_inputs={"a": 2**63}), "multimodal_inputs.a"),
        (dict(multimodal_inputs={"a": np.array(["x"])}), "multimodal_inputs.a"),
        (dict(multimodal_inputs={"a": "\ud800"}), "multimodal_inputs.a"),
        (dict(spec_info=SpecInfo("x")), "spec_info.spec_accept_token_num"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_travel_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        encode_sample(Sample(**changes))
    assert caught.value.field == field


def test_trees_that_are_too_deep_or_turn_back_are_named() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = loop
    for name in ("metadata", "multimodal_inputs"):
        with pytest.raises(InvalidField, match="levels"):
            encode_sample(Sample(**{name: loop}))


@given(st.integers(1, 200), st.sampled_from(["metadata", "train_metadata", "label", "reward", "colour"]))
def test_what_a_message_may_hold_can_be_sent_again(levels: int, name: str) -> None:
    tree: Any = {}
    for _ in range(levels - 1):
        tree = {"a": tree}
    sample = Sample(**{name: tree}) if name != "colour" else Sample()
    sample.colour = tree if name == "colour" else 1
    message = sample_to_proto(Sample())
    field = "extra_json" if name == "colour" else f"{name}_json"
    text = '{"a":' * (levels - 1) + "{}" + "}" * (levels - 1)
    setattr(message, field, f'{{"colour":{text}}}' if name == "colour" else text)
    if levels <= 101:
        assert encode_sample(sample_from_proto(message)) and encode_sample(sample)
        return
    with pytest.raises(InvalidField, match=f"{field}: got a deeper tree, expected at most 100 levels"):
        sample_from_proto(message)
    with pytest.raises(InvalidField, match="at most 100 levels"):
        encode_sample(sample)


def test_unknown_attributes_travel_as_json() -> None:
    sample = Sample()
    sample.colour = object()
    with pytest.raises(InvalidField, match="colour"):
        encode_sample(sample)
    for name in ("tokens", "validate", "__class__"):
        with pytest.raises(InvalidField, match=f"extra_json.{name}"):
            sample_from_proto(sample_pb2.Sample(extra_json=f'{{"{name}": 1}}'))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (sample_pb2.Sample(status=9), "status"),  # type: ignore[arg-type]
        (sample_pb2.Sample(metadata_json="{"), "metadata_json"),
        (sample_pb2.Sample(metadata_json="[]"), "metadata_json"),
        (sample_pb2.Sample(prompt_messages_json='{"a": 1}'), "prompt_messages_json"),
        (sample_pb2.Sample(tokens=tensor_pb2.Tensor(dtype=6, shape=[2], inline=b"1234")), "tokens.inline"),  # type: ignore[arg-type]
        (sample_pb2.Sample(tokens=tensor_pb2.Tensor(dtype=6, shape=[1, 1], inline=b"1234")), "tokens"),  # type: ignore[arg-type]
        (sample_pb2.Sample(tokens=tensor_pb2.Tensor(shape=[1], inline=b"1234")), "tokens.dtype"),
        (sample_pb2.Sample(tokens=tensor_pb2.Tensor(dtype=6, shape=[1])), "tokens.data"),  # type: ignore[arg-type]
        (sample_pb2.Sample(loss_mask=tensor_pb2.Tensor(dtype=6, shape=[-1], inline=b"")), "loss_mask.shape"),  # type: ignore[arg-type]
    ],
)
def test_messages_that_break_the_contract_are_named(message: sample_pb2.Sample, field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        sample_from_proto(message)
    assert caught.value.field == field
    with pytest.raises(InvalidField, match="an encoded"):
        decode_sample(b"\xff\xff")


def test_another_integer_type_is_converted_and_checked() -> None:
    message = sample_pb2.Sample(tokens=tensor_to_proto(np.array([1, 2], np.int64)))
    assert sample_from_proto(message).array("tokens").dtype == np.int32
    with pytest.raises(InvalidField, match=r"tokens\[0\]"):
        sample_from_proto(sample_pb2.Sample(tokens=tensor_to_proto(np.array([2**40], np.int64))))


def test_references_need_a_resolver() -> None:
    reference = tensor_pb2.BlobReference(store="blobs", sha256=b"s", length=8)
    message = sample_pb2.Sample(
        tokens=tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT32, shape=[2], reference=reference)
    )
    with pytest.raises(InvalidField, match="no blob store is configured"):
        sample_from_proto(message)
    seen = []
    resolved = sample_from_proto(message, resolve=lambda r: seen.append(r.store) or np.array([3, 4], "<i4").tobytes())  # type: ignore[func-returns-value]
    assert resolved.tokens == [3, 4] and seen == ["blobs"]
    with pytest.raises(InvalidField, match="length"):
        sample_from_proto(message, resolve=lambda r: b"1234")


def test_groups_keep_their_order_and_name() -> None:
    group = SampleGroup(3, "gsm", [Sample(index=i) for i in (5, 4)])
    assert group_from_proto(group_to_proto(group)) == group
    assert group_from_proto(sample_pb2.SampleGroup()) == SampleGroup(0)


@given(arrays)
def test_any_array_survives(array: np.ndarray) -> None:
    back = tensor_from_proto(tensor_to_proto(array))
    assert back.dtype == array.dtype and back.shape == array.shape
    assert np.array_equal(back, array, equal_nan=array.dtype.kind == "f")


def test_layout_byte_order_and_bfloat16() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3).T
    assert np.array_equal(tensor_from_proto(tensor_to_proto(array)), array)
    bits = np.array([0x3F80, 0xFFFF], np.uint16)
    message = tensor_to_proto(bits, dtype=tensor_pb2.DATA_TYPE_BFLOAT16)
    assert message.dtype == tensor_pb2.DATA_TYPE_BFLOAT16 and np.array_equal(tensor_from_proto(message), bits)
    with pytest.raises(InvalidField):
        tensor_to_proto(np.zeros(1, np.complex64))
    with pytest.raises(InvalidField, match="above 1"):
        tensor_from_proto(tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_BOOL, shape=[1], inline=b"\x02"))


@settings(deadline=None)
@given(trees)
def test_any_tree_survives(tree: Any) -> None:
    message = tensor_pb2.Value()
    fill_value(message, tree, "tree")
    back = value_from_proto(tensor_pb2.Value.FromString(message.SerializeToString()), "tree")
    assert Sample(multimodal_inputs={"x": back}) == Sample(multimodal_inputs={"x": tree})
    assert value_from_proto(tensor_pb2.Value(), "tree") is None
    assert sample_to_proto(Sample()).status == sample_pb2.SAMPLE_STATUS_PENDING
