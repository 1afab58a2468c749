"""Two runs that would write to one directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime.launcher.run_directory.lock import sole_writer
from slime.types.errors import InvalidSetting

OTHER = "import sys; from pathlib import Path; from slime.launcher.run_directory.lock import sole_writer\n"


def test_a_directory_is_held_by_one_run(tmp_path: Path) -> None:
    held = f"{OTHER}with sole_writer(Path({str(tmp_path)!r})):\n    print('held', flush=True); sys.stdin.read()\n"
    with subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(InvalidSetting, match=f"--output-dir {tmp_path}: another run writes there"):
            with sole_writer(tmp_path):
                raise AssertionError("held by another")
        other.kill()
        other.wait(120)
        with sole_writer(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
