"""A program raises the errors that are not of its output."""

from __future__ import annotations

import io

import pytest

from slime.types.programs import INTERRUPTED, run_printing


@pytest.mark.parametrize("error", [OSError(28, "No space left"), FileNotFoundError(2, "No such file", "weights")])
def test_an_error_of_another_file_is_raised(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> int:
        raise error

    monkeypatch.setattr("sys.stdout", io.StringIO())
    with pytest.raises(OSError) as caught:
        run_printing("slime", command)
    assert caught.value is error


def test_an_interrupt_that_no_command_handles_ends_a_program_without_a_traceback() -> None:
    def command() -> int:
        raise KeyboardInterrupt

    assert run_printing("slime", command) == INTERRUPTED == 130
