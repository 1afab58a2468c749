"""The programs end in one line, or none, where their standard output takes no more text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.buffer import cli as buffer
from slime.converters import cli as converters
from slime.launcher import cli as launcher
from slime.rollout import cli as rollout
from slime.trainer import cli as trainer

COMMANDS = {
    "slime --help": launcher, "slime runs {run}": launcher, "slime-buffer --help": buffer,
    "slime-rollout --help": rollout, "slime-trainer --help": trainer, "slime-convert --help": converters,
    "slime-convert inspect {weights}": converters,
}  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import numpy as np
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("run")
    (directory / "run").mkdir()
    (directory / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    save_file({"a": np.zeros(1, np.float32)}, directory / "m.safetensors")
    return {"run": directory, "weights": directory / "m.safetensors"}


@pytest.mark.parametrize("output", ["", ">/dev/full", ">&-"], ids=["no reader", "full", "closed"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_takes_no_more_leaves_no_traceback(command: str, output: str, paths: dict[str, Path]) -> None:
    program, *words = command.format(**paths).split()
    line = " ".join([sys.executable, "-m", COMMANDS[command].__name__, *words, output])
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            ["bash", "-c", line], env=os.environ | environment, stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    full = f"{program}: error: cannot write to the standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == {"": (141, ""), ">/dev/full": (1, full), ">&-": (0, "")}[output]
