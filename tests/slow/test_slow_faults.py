"""A few faults in runs of each kind that `random_faults.py` knows, and launchers that are ended during a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slow_cases import slow

pytestmark = slow

SCRIPT = Path(__file__).with_name("random_faults.py")
KINDS = ("plain", "two-ranks", "megatron", "fully-async", "external")


@pytest.mark.parametrize("flags", [*(("--kind", kind) for kind in KINDS), ("--terminate",)], ids=" ".join)
def test_runs_go_on_or_end_whatever_dies(flags: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--faults", "3", "--num-rollout", "8", "--directory", tmp_path, *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
