"""Errors of slime-convert's commands in the words of their command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.converters import cli

NUM_GPUS = 0

COMMANDS = {
    "hf-to-torch-dist": ("--hf-checkpoint", "--save"),
    "hf-to-gguf": ("--hf-checkpoint", "--output"),
    "torch-dist-to-hf": ("--input-dir", "--output-dir"),
    "to-hf": ("--load", "--output-dir"),
    "gguf-to-hf": ("--gguf", "--output-dir"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("content", [None, {}, {"config.json": "{"}], ids=["missing", "empty", "broken"])
def test_a_source_that_cannot_be_read_is_named_with_its_flag(
    command: str, content: dict[str, str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    if content is not None:
        source.mkdir()
        for name, text in content.items():
            (source / name).write_text(text)
    flag, target = COMMANDS[command]
    assert cli.main([command, flag, str(source), target, str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"slime-convert: error: {flag}") and error.count(flag) == 1 and str(source) in error


def test_an_unknown_option_is_not_mistaken_for_one_that_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hf-to-torch-dist", "--hf-checkpoint", "x", "--output", "y"]) == 2
    assert "unknown option --output; see --help" in capsys.readouterr().err
