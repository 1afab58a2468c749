"""`slime export` that is killed between two formats leaves a model, which the next export to that place removes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.converters.convert import to_hf
from slime.launcher.cli import export
from slime.types.errors import OutOfSpace

KILLED = """
import os, signal, sys
from pathlib import Path
from slime.converters.convert import to_hf
from slime.launcher.cli import export

def convert(source, output, **options):
    output.mkdir()
    (output / "model.safetensors").write_text("large")
    os.kill(os.getpid(), signal.SIGKILL)

export.model_of = lambda run, step: (run, None)
to_hf.convert = convert
export.export(Path(sys.argv[1]), Path(sys.argv[2]), "gguf")
"""


def test_the_model_that_a_killed_export_left_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, output = tmp_path / "iter_0000001", tmp_path / "exports" / "m.gguf"
    checkpoint.mkdir()
    killed = subprocess.run([sys.executable, "-c", KILLED, checkpoint, output], check=False)
    assert killed.returncode == -signal.SIGKILL and list(output.parent.glob(".export-*"))

    def full(*_: Any, **options: Any) -> Path:
        raise OutOfSpace("no space left")

    monkeypatch.setattr(export, "model_of", lambda run, step: (run, None))
    monkeypatch.setattr(to_hf, "convert", full)
    with pytest.raises(OutOfSpace):
        export.export(checkpoint, output, "gguf")
    assert list(output.parent.iterdir()) == []
