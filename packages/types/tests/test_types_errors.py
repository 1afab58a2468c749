"""Errors that cross a process."""

from __future__ import annotations

import pickle
import re

import pytest

from slime.types import Sample, errors


@pytest.mark.parametrize("name", sorted(errors.error_classes()))
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


def test_wrong_values_are_the_errors_that_python_code_expects() -> None:
    for cls in (errors.InvalidField, errors.PluginError):
        assert issubclass(cls, ValueError) and issubclass(cls, TypeError)
    for cls in (errors.InvalidSetting, errors.UnknownFlag):
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
