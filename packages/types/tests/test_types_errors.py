"""Errors that cross a process."""

from __future__ import annotations

import pickle

import pytest

from slime.types import errors


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
