"""Starts the processes of one trainer, each running a script of this directory."""

import os
import subprocess
import sys
from pathlib import Path

DEADLINE_SECONDS = 400


def run_ranks(script: str, world_size: int, directory: Path, *arguments: str) -> list[str]:
    """`script RANK WORLD_SIZE DIR ARGUMENTS` in `world_size` processes; what each wrote to stderr.

    A failure is for the caller to find in DIR: where one rank fails others fail by it.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # More threads than cores that spin while they wait slow every rank down by an order of magnitude.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    path = str(Path(__file__).with_name(script))
    processes = [
        subprocess.Popen(
            [sys.executable, path, str(rank), str(world_size), str(directory), *arguments],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        return [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
