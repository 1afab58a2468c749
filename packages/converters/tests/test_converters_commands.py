"""Errors of slime-convert's commands in the words of their command lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

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


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        ("", 141, ""),
        (">/dev/full", 1, "slime-convert: error: cannot write to the standard output: No space left on device\n"),
    ],
    ids=["no reader", "full"],
)
def test_an_output_that_takes_no_more_is_told_in_one_line(output: str, code: int, message: str, tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "m.safetensors")
    program = f"{sys.executable} -m slime.converters.cli inspect {tmp_path}/m.safetensors {output}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            ["bash", "-c", program], env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (code, message)


def test_an_unknown_option_is_not_mistaken_for_one_that_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["hf-to-torch-dist", "--hf-checkpoint", "x", "--output", "y"]) == 2
    assert "unknown option --output; see --help" in capsys.readouterr().err
