"""`Sample` as a Python object: lists outside and arrays inside, appending, and what `validate` refuses."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime.types import Sample, TokenSpan
from slime.types.errors import InvalidField
from slime.utils.types import Sample as CompatibleSample


def int32(values: list[int]) -> str:
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


def test_both_import_paths_give_one_class() -> None:
    assert CompatibleSample is Sample
    assert [s.value for s in Sample.Status] == ["pending", "completed", "truncated", "aborted", "failed"]


def test_importing_the_types_is_light() -> None:
    code = "import slime.types, sys; print([m for m in ('google', 'grpc', 'torch', 'ray', 'yaml') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tokens", np.int32),
        ("loss_mask", np.uint8),
        ("rollout_log_probs", np.float32),
        ("teacher_log_probs", np.float32),
        ("rollout_top_p_token_ids", np.int32),
        ("rollout_top_p_token_offsets", np.int64),
    ],
)
def test_per_token_fields_are_arrays_inside_and_lists_of_python_numbers_outside(name: str, dtype: Any) -> None:
    for value in ([0, 1, 1], (0, 1, 1), np.array([0, 1, 1]), np.array([0.0, 1.0, 1.0])):
        sample = Sample(**{name: value})
        array = sample.array(name)
        assert array is not None and array.dtype == dtype and array.tolist() == [0, 1, 1]
        shown = getattr(sample, name)
        assert type(shown) is list and shown == [0, 1, 1]
        assert all(type(number) in (int, float) for number in shown)
    sample = Sample()
    setattr(sample, name, [])
    assert sample.array(name).dtype == dtype and getattr(sample, name) == []


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("tokens", [1, 2.5], "tokens[1]"),
        ("tokens", [2**31], "tokens[0]"),
        ("tokens", np.array([2**63 + 1], np.uint64), "tokens[0]"),
        ("tokens", None, "tokens"),
        ("tokens", "text", "tokens"),
        ("tokens", [[1]], "tokens"),
        ("tokens", [1, None], "tokens"),
        ("tokens", [[1], [2, 3]], "tokens"),
        ("tokens", [float("nan")], "tokens[0]"),
        ("loss_mask", [0, -1], "loss_mask[1]"),
        ("loss_mask", [256], "loss_mask[0]"),
        ("rollout_log_probs", ["a"], "rollout_log_probs"),
        ("rollout_routed_experts", [[[0.5]]], "rollout_routed_experts[0]"),
    ],
)
def test_what_is_no_array_of_the_field_is_refused(name: str, value: Any, field: str) -> None:
    sample = Sample()
    with pytest.raises(InvalidField) as caught:
        setattr(sample, name, value)
    assert caught.value.field == field
    assert sample == Sample()


def arrays_inside() -> Sample:
    """Returns a sample that came over the wire, and of which no list has been read yet."""
    return Sample(
        tokens=np.arange(400, dtype=np.int32),
        response_length=300,
        loss_mask=np.ones(300, np.uint8),
        rollout_log_probs=np.full(300, -0.5, np.float32),
    )


def test_what_code_written_for_lists_does_works_on_every_sample() -> None:
    a, b = arrays_inside(), Sample(tokens=[7, 8], response_length=1)
    assert sum(a.loss_mask) == 300
    assert a.tokens + b.tokens == [*range(400), 7, 8] and [1] + b.tokens == [1, 7, 8]
    assert a.tokens[:2] + a.tokens[1:2] == [0, 1, 1]
    assert a.tokens == list(range(400)) and a.tokens != b.tokens
    assert a.tokens.index(5) == 5 and a.loss_mask.count(1) == 300 and 5 in a.tokens
    assert json.loads(json.dumps([a.tokens, a.loss_mask, a.rollout_log_probs]))[2] == [-0.5] * 300
    assert json.loads(json.dumps(a.to_dict()))["tokens"] == a.tokens
    assert [0] * len(b.tokens) + a.loss_mask[:1] == [0, 0, 1] and a.loss_mask * 2 == [1] * 600
    assert not Sample().tokens and b.tokens
    assert pickle.loads(pickle.dumps(a)) == a == copy.deepcopy(a)


def test_what_a_list_does_in_place_changes_the_sample() -> None:
    sample = arrays_inside()
    shown = sample.tokens
    shown.append(9)
    sample.tokens.extend([10, 11])
    sample.tokens += [12]
    sample.tokens[0] = 5
    assert sample.tokens is shown and shown[0] == 5 and shown[-4:] == [9, 10, 11, 12]
    assert sample.array("tokens").tolist() == shown
    mask: list[int] = []
    sample.loss_mask = mask
    mask.extend([1, 0])
    assert sample.array("loss_mask").tolist() == [1, 0]
    shown.append("text")
    with pytest.raises(InvalidField, match="tokens"):
        sample.array("tokens")


def test_reading_arrays_leaves_no_list_behind() -> None:
    sample = arrays_inside()
    held = sample.array("tokens")
    sample.validate()
    sample.append_response_tokens(tokens=[13], log_probs=[-0.5], trainable=True)
    assert sample.effective_response_length == 301 and sample == copy.deepcopy(sample)
    assert len(held) == 400 and all(type(sample.__dict__[name]) is not list for name in ("tokens", "loss_mask"))


def test_appending_to_a_sample_whose_lists_a_plug_in_holds() -> None:
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=[3], log_probs=[-0.5])
    sample.loss_mask.append(0)
    sample.tokens, sample.rollout_log_probs = sample.tokens + [4], sample.rollout_log_probs + [0.0]
    sample.response_length += 1
    sample.append_response_tokens(tokens=[5], log_probs=[-0.25])
    sample.validate()
    assert sample.tokens == [1, 2, 3, 4, 5] and sample.loss_mask == [1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, 0.0, -0.25]


def test_samples_compare_copy_and_pickle() -> None:
    sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[float("nan")], reward={"a": float("nan")})
    for twin in (copy.deepcopy(sample), pickle.loads(pickle.dumps(sample)), Sample.from_dict(sample.to_dict())):
        assert twin == sample and twin.tokens == [1, 2]
    other = copy.deepcopy(sample)
    other.tokens[0] = 7
    assert other != sample and sample.tokens[0] == 1
    assert Sample(loss_mask=[]) != Sample() != "sample"


def test_dicts_keep_unknown_keys() -> None:
    sample = Sample(status=Sample.Status.FAILED, spans=[TokenSpan(0, 1, "m", "3")])
    sample.spec_info.spec_verify_ct = 4
    data = sample.to_dict() | {"colour": "red"}
    assert data["status"] == "failed" and data["spec_info"]["spec_verify_ct"] == 4 and data["spans"][0]["end"] == 1
    back = Sample.from_dict(data)
    assert back.colour == "red" and back.status is Sample.Status.FAILED and back.spans == sample.spans
    assert Sample.from_dict({}) == Sample()
    with pytest.raises(InvalidField, match="status: got done"):
        Sample.from_dict({"status": "done"})


def test_rewards_and_effective_length() -> None:
    assert Sample(reward=2.0).get_reward_value(SimpleNamespace(reward_key=None)) == 2.0
    assert Sample(reward={"score": 3}).get_reward_value(SimpleNamespace(reward_key="score")) == 3
    assert Sample(response_length=4).effective_response_length == 4
    assert Sample(response_length=300, loss_mask=[1] * 299 + [0]).effective_response_length == 299


def test_appending_keeps_everything_aligned() -> None:
    sample = Sample(tokens=[1, 2])
    engine = {"weight_version": 3, "cached_tokens": 1, "prompt_tokens": 2, "finish_reason": {"type": "length"}}
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-1.0, -2.0], meta_info=engine, text="ab")
    sample.append_response_tokens(tokens=[5], log_probs=None, trainable=False, text="<tool>")
    sample.append_response_tokens(
        tokens=[6], log_probs=[-3.0], meta_info=engine | {"weight_version": "4"}, update_terminal_info=False
    )
    sample.append_response_tokens(tokens=[], log_probs=[], meta_info={"finish_reason": {"type": "stop"}})
    sample.validate()
    assert sample.tokens == [1, 2, 3, 4, 5, 6] and sample.response_length == 4
    assert sample.loss_mask == [1, 1, 0, 1] and sample.rollout_log_probs == [-1, -2, 0, -3]
    assert sample.response == "ab<tool>" and sample.status is Sample.Status.COMPLETED
    assert sample.weight_versions == ["3", "4"]
    assert sample.spans == [TokenSpan(0, 2, "", "3"), TokenSpan(3, 4, "", "4")]
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.5


@pytest.mark.parametrize("reason", [{"type": "odd"}, "odd", None, {}, 3, ["stop"]])
def test_a_finish_reason_that_is_not_known_leaves_the_status(reason: Any) -> None:
    sample = Sample(tokens=[1], status=Sample.Status.TRUNCATED)
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0], meta_info={"finish_reason": reason})
    assert sample.status is Sample.Status.TRUNCATED and sample.tokens == [1, 2]


def test_a_missing_mask_is_filled_with_ones_and_continued_spans_merge() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, rollout_log_probs=[0.0, 0.0])
    for token in (7, 8):
        sample.append_response_tokens(tokens=[token], log_probs=[-1], meta_info={"weight_version": "1"})
    assert sample.loss_mask == [1, 1, 1, 1]
    assert sample.spans == [TokenSpan(2, 4, "", "1")]


def test_nucleus_and_experts_grow_with_the_tokens() -> None:
    args = SimpleNamespace(num_layers=2, moe_router_topk=1)
    sample = Sample(tokens=[1])
    sample.append_response_tokens(
        args,
        tokens=[5, 6],
        log_probs=[-1, -1],
        meta_info={
            "top_p_token_ids": int32([5, 9, 6]),
            "top_p_token_offsets": [0, 2, 3],
            "routed_experts": int32([1, 2, 3, 4]),
        },
    )
    sample.append_response_tokens(args, tokens=[7], trainable=False)
    sample.append_response_tokens(
        args,
        tokens=[8],
        log_probs=[-1],
        meta_info={
            "top_p_token_ids": [8],
            "top_p_token_offsets": [0, 1],
            "routed_experts": int32([5, 6, 7, 8]),
            "routed_experts_start_len": 2,
        },
    )
    sample.validate()
    assert sample.rollout_top_p_token_ids == [5, 9, 6, 8]
    assert sample.rollout_top_p_token_offsets == [0, 2, 3, 3, 4]
    assert sample.rollout_routed_experts.reshape(-1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("keywords", "field"),
    [
        (dict(tokens=[1]), "log_probs"),
        (dict(tokens=[1], log_probs=[0, 0]), "log_probs"),
        (dict(tokens=[1], log_probs=[0], trainable=False), "log_probs"),
        (dict(tokens=[1], log_probs=[0]), "rollout_log_probs"),
        (dict(tokens=[1], trainable=False, meta_info={"top_p_token_ids": [1]}), "meta_info.top_p_token_offsets"),
        (
            dict(tokens=[1], trainable=False, meta_info={"top_p_token_ids": [1], "top_p_token_offsets": [0]}),
            "meta_info.top_p_token_offsets",
        ),
        (dict(tokens=[1], trainable=False, meta_info={"routed_experts": "AAAA"}), "meta_info.routed_experts"),
        (dict(tokens=[1], trainable=False, meta_info={"routed_experts": "?"}), "meta_info.routed_experts"),
        (dict(tokens=[1], trainable=False, meta_info={"routed_experts": int32([1])}), "args"),
    ],
)
def test_a_refused_append_leaves_the_sample_as_it_was(keywords: dict[str, Any], field: str) -> None:
    sample = Sample(tokens=[1, 2], response_length=1)
    before = copy.deepcopy(sample)
    with pytest.raises(InvalidField) as caught:
        sample.append_response_tokens(**keywords)
    assert caught.value.field == field
    assert sample == before


def test_an_append_behind_a_teachers_log_probs_is_refused() -> None:
    """The teacher scores a whole response: later it would be unknown which tokens have no score."""
    sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0], teacher_log_probs=[-0.5])
    before = copy.deepcopy(sample)
    with pytest.raises(InvalidField, match="teacher_log_probs: got length 1, expected 2"):
        sample.append_response_tokens(tokens=[3], log_probs=[-2.0])
    assert sample == before
    sample.teacher_log_probs = None
    sample.append_response_tokens(tokens=[3], log_probs=[-2.0])
    sample.teacher_log_probs = [-0.5, -0.25]
    sample.validate()


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (dict(response_length=4), "response_length", ["4", "at most 3"]),
        (dict(response_length=-1), "response_length", ["-1"]),
        (dict(loss_mask=[1]), "loss_mask", ["length 1", "expected 2"]),
        (dict(loss_mask=[1, 2]), "loss_mask", ["2", "0 or 1"]),
        (dict(rollout_log_probs=[0, 0, 0]), "rollout_log_probs", ["length 3", "expected 2"]),
        (dict(teacher_log_probs=[]), "teacher_log_probs", ["length 0", "expected 2"]),
        (dict(rollout_top_p_token_ids=[1]), "rollout_top_p_token_offsets", []),
        (dict(rollout_top_p_token_offsets=[0, 0, 0]), "rollout_top_p_token_ids", []),
        (
            dict(rollout_top_p_token_ids=[1], rollout_top_p_token_offsets=[0, 1]),
            "rollout_top_p_token_offsets",
            ["length 2", "expected 3"],
        ),
        (
            dict(rollout_top_p_token_ids=[1], rollout_top_p_token_offsets=[0, 2, 1]),
            "rollout_top_p_token_offsets",
            ["[0, 2, 1]"],
        ),
        (
            dict(rollout_top_p_token_ids=[1], rollout_top_p_token_offsets=[0, 1, 2]),
            "rollout_top_p_token_ids",
            ["length 1", "expected 2"],
        ),
        (
            dict(rollout_routed_experts=np.zeros((3, 1, 1), np.int32)),
            "rollout_routed_experts",
            ["length 3", "expected 2"],
        ),
        (dict(rollout_routed_experts=[1, 2]), "rollout_routed_experts", ["(2,)", "3 dimensions"]),
        (dict(spans=[TokenSpan(0, 3)]), "spans[0]", ["[0, 3)"]),
        (dict(spans=[TokenSpan(0, 2), TokenSpan(1, 2)]), "spans[1]", ["[1, 2)"]),
        (dict(status="completed"), "status", ["completed"]),
    ],
)
def test_validate_names_the_field_and_both_lengths(changes: dict[str, Any], field: str, words: list[str]) -> None:
    Sample(tokens=[1, 2, 3], response_length=2).validate()
    with pytest.raises(InvalidField) as caught:
        Sample(**(dict(tokens=[1, 2, 3], response_length=2) | changes)).validate()
    assert caught.value.field == field
    for word in words:
        assert word in str(caught.value)
