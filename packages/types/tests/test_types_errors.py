"""Errors that cross a process."""

from __future__ import annotations

import functools
import pickle
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.types import Sample, errors
from slime.types.errors import InvalidSetting, NotAvailable, UnknownFlag
from slime.types.rpc.status import detail_of, error_of
from slime.v1 import error_pb2

# Errors of other packages are known here only if a test of theirs ran before.
OURS = sorted(name for name, cls in errors.error_classes().items() if cls.__module__.startswith("slime.types."))


@pytest.mark.parametrize("name", OURS)
def test_an_error_of_another_process_is_the_same_error(name: str) -> None:
    error = errors.error_classes()[name].restore("tokens: got 3", field="tokens", value="3", expected="4")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.message, copy.field, copy.value, copy.expected) == ("tokens: got 3", "tokens", "3", "4")
    assert str(copy) == "tokens: got 3"


def test_an_invalid_field_says_what_was_given_and_what_was_expected() -> None:
    error = errors.InvalidField("loss_mask", 3, "5 (response_length)")
    assert str(error) == "loss_mask: got 3, expected 5 (response_length)"
    assert (error.field, error.value, error.expected) == ("loss_mask", "3", "5 (response_length)")


# (error, message, field, value, expected)
WORDED: list[tuple[errors.ConfigError, str, str, str, str]] = [
    (
        InvalidSetting.must_be("--temperature", "greater than 0", got=-1),
        "--temperature must be greater than 0, got -1",
        "--temperature", "-1", "greater than 0",
    ),
    (
        InvalidSetting.must_be("--temperature", "greater than 0", got=-1.0),
        "--temperature must be greater than 0, got -1",
        "--temperature", "-1", "greater than 0",
    ),
    (
        InvalidSetting.must_be("--num-rollout", "an integer", got=8.0),
        "--num-rollout must be an integer, got 8.0",
        "--num-rollout", "8.0", "an integer",
    ),
    (
        InvalidSetting.must_be("--save", "a directory", got="a.txt", reason="checkpoints are directories"),
        "--save must be a directory, got 'a.txt': checkpoints are directories",
        "--save", "a.txt", "a directory",
    ),
    (
        InvalidSetting.one_of("--train-backend", ("fsdp", "megatron"), got="megatorn"),
        "--train-backend must be one of fsdp, megatron, got 'megatorn'; did you mean megatron?",
        "--train-backend", "megatorn", "megatron",
    ),
    (
        InvalidSetting.conflict("--colocate", "--rollout-external-engine-addrs", "they have no GPU to share"),
        "--colocate and --rollout-external-engine-addrs cannot be used together: they have no GPU to share",
        "--colocate", "", "no --colocate, or no --rollout-external-engine-addrs",
    ),
    (
        InvalidSetting.conflict("--num-epoch 2", "--num-rollout 1"),
        "--num-epoch 2 and --num-rollout 1 cannot be used together",
        "--num-epoch", "2", "no --num-epoch, or no --num-rollout",
    ),
    (
        InvalidSetting.requires("--save-interval 5", "--save DIR"),
        "--save-interval 5 requires --save DIR",
        "--save-interval", "5", "--save DIR",
    ),
    (
        InvalidSetting.required("--num-rollout", "iterations of the run"),
        "--num-rollout is required: iterations of the run",
        "--num-rollout", "", "a value",
    ),
    (
        NotAvailable.unavailable("--use-foo", "there is no kernel for it"),
        "--use-foo is not supported yet: there is no kernel for it",
        "--use-foo", "", "",
    ),
    (
        NotAvailable.unavailable("--mode delta", "weights are sent whole", "--mode full"),
        "--mode delta is not supported yet: weights are sent whole; use --mode full",
        "--mode", "delta", "--mode full",
    ),
    (
        UnknownFlag.unknown("option", "--rolout-batch-size", ["--seed", "--rollout-batch-size"]),
        "unknown option --rolout-batch-size; did you mean --rollout-batch-size?",
        "--rolout-batch-size", "", "--rollout-batch-size",
    ),
    (
        UnknownFlag.unknown("option", "--foo", ["--seed"]),
        "unknown option --foo; see --help",
        "--foo", "", "--seed",
    ),
    (
        UnknownFlag.unknown("option", "--prot", ["--port", "--host"], refused=["--port"]),
        "unknown option --prot; see --help",
        "--prot", "", "--port, --host",
    ),
    (
        UnknownFlag.unknown("option", "--model", ["--mode"], instead="--hf-checkpoint DIR"),
        "unknown option --model; use --hf-checkpoint DIR",
        "--model", "", "--hf-checkpoint DIR",
    ),
    (
        NotAvailable.unavailable("rope_type 'yarn'", "the family has linear").at("config.json"),
        "config.json: rope_type 'yarn' is not supported yet: the family has linear",
        "rope_type", "'yarn'", "",
    ),
    (
        InvalidSetting.unknown("reward function", "foo", ["math", "integer"], field="--rm-type"),
        "--rm-type: unknown reward function 'foo'; known ones are math, integer",
        "--rm-type", "foo", "math, integer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "field", "value", "expected"), WORDED)
def test_each_kind_of_fault_is_worded_in_one_way(
    error: errors.ConfigError, message: str, field: str, value: str, expected: str
) -> None:
    assert str(error) == message
    assert (error.field, error.value, error.expected) == (field, value, expected)
    over_the_wire = error_of(error_pb2.ErrorDetail.FromString(detail_of(error).SerializeToString()))
    assert type(over_the_wire) is type(error)
    assert vars(over_the_wire) == vars(error)


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("--sglang-tp", ["--sglang-ep", "--sglang-tp-size"], "--sglang-tp-size"),
        ("--rollout-batch", ["--rollout-batch-size", "--rollout-batch-wait", "--rollout-bath"], "--rollout-bath"),
        ("gpro", ["grpo", "gspo"], "grpo"),
        ("GRPO", ["cispo", "grpo"], "grpo"),
        ("zzz", ["grpo"], None),
        ("--foo", ["--offload"], None),
        ("--frobnicate", ["--colocate"], None),
        ("--learning-rate", ["--lr", "--log-passrate"], None),
        ("--lr-rate", ["--lr", "--lr-decay-style", "--log-passrate"], "--lr"),
        ("--hf-ckpt", ["--hf-checkpoint", "--load"], "--hf-checkpoint"),
        ("--foo-bar", ["--lr", "--hf-checkpoint", "--load", "--offload-rollout"], None),
        ("rollout_batchsize", ["--rollout-batch-size"], "--rollout-batch-size"),
        ("", ["grpo"], None),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant(typed: str, known: list[str], meant: str | None) -> None:
    assert errors.nearest(typed, known) == meant


def test_a_long_value_is_cut_in_the_message() -> None:
    error = InvalidSetting.must_be("--stop", "text", got="x" * 5000)
    assert len(str(error)) < 300 and len(error.value) == 200


def test_wrong_values_are_the_errors_that_python_code_expects() -> None:
    for cls in (errors.InvalidField, errors.PluginError):
        assert issubclass(cls, ValueError) and issubclass(cls, TypeError)
    for cls in (errors.InvalidSetting, errors.InvalidFile, errors.UnknownFlag):
        assert issubclass(cls, ValueError) and not issubclass(cls, TypeError)
    with pytest.raises(ValueError, match="tokens: got "):
        Sample(tokens=["text"])  # type: ignore[list-item]
    assert isinstance(pickle.loads(pickle.dumps(errors.InvalidField("tokens", 3.5, "integers"))), TypeError)


def test_the_tree_in_the_docstring_marks_the_classes_that_are_errors_of_python() -> None:
    marks = dict(re.findall(r"(\w+) \((.)\)", errors.__doc__ or ""))
    for name, cls in errors.error_classes().items():
        if cls.__module__ == errors.__name__:
            expected = "+" if issubclass(cls, TypeError) else "v" if issubclass(cls, ValueError) else None
            assert marks.get(name) == expected, name


BOMB: Any = functools.reduce(lambda inner, _: [inner] * 9, range(12), "lol")


@pytest.mark.parametrize("value", [[BOMB], [{"a": BOMB}], [[{"a": BOMB}]], [16**5000]])
def test_values_of_any_size_are_shown_in_part(value: Any) -> None:
    for error in (InvalidSetting.must_be("name", "text", got=value), InvalidSetting.one_of("name", ["a"], got=value)):
        assert len(error.message) < 300 and len(error.value) <= 200
    assert len(errors.InvalidField("name", value, "text").message) < 300


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(PLAIN)
def test_short_values_are_shown_as_python_does(value: Any) -> None:
    shown = repr(value)
    if len(shown) <= 200 and not isinstance(value, float):
        assert InvalidSetting.must_be("name", "text", got=value).message == f"name must be text, got {shown}"


@pytest.mark.parametrize(("value", "shown"), [("", "''"), (" \n", "' \\n'"), ("text", "text")])
def test_a_field_without_visible_text_is_quoted(value: str, shown: str) -> None:
    assert errors.InvalidField("prompt", value, "text").message == f"prompt: got {shown}, expected text"


def test_messages_do_not_control_a_terminal_and_can_always_be_printed() -> None:
    error = errors.EngineError("server: \x1b]0;owned\x07\x9b31m\u202e half \ud83d\n\tä ok")
    assert str(error) == error.message == "server: \\x1b]0;owned\\x07\\x9b31m\\u202e half \\ud83d\n\tä ok"
    assert errors.EngineError.restore(error.message).message == error.message, (
        "escaped once, wherever it is raised again"
    )
