"""The services' programs end in one line, or none, where their standard output takes no more text."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from slime.buffer import cli as buffer
from slime.converters import cli as converters
from slime.rollout import cli as rollout
from slime.trainer import cli as trainer

PROGRAMS = {
    "slime-buffer": buffer, "slime-rollout": rollout, "slime-trainer": trainer, "slime-convert": converters,
}  # fmt: skip


@pytest.mark.parametrize("output", ["", ">/dev/full", ">&-"], ids=["no reader", "full", "closed"])
@pytest.mark.parametrize(("program", "module"), PROGRAMS.items(), ids=PROGRAMS)
def test_help_that_cannot_be_written_leaves_no_traceback(program: str, module: ModuleType, output: str) -> None:
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            ["bash", "-c", f"{sys.executable} -m {module.__name__} --help {output}"],
            env=os.environ | environment, stdout=writer, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        os.close(writer)
    full = f"{program}: error: cannot write to the standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == {"": (141, ""), ">/dev/full": (1, full), ">&-": (0, "")}[output]
