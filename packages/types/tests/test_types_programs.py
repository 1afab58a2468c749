"""A program raises the errors that are not of its output."""

from __future__ import annotations

import io

import pytest

from slime.types.programs import run_printing


@pytest.mark.parametrize("error", [OSError(28, "No space left"), FileNotFoundError(2, "No such file", "weights")])
def test_an_error_of_another_file_is_raised(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> int:
        raise error

    monkeypatch.setattr("sys.stdout", io.StringIO())
    with pytest.raises(OSError) as caught:
        run_printing("slime", command)
    assert caught.value is error
