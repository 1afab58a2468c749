"""Starts the processes of one trainer, each running a script of this directory."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

DEADLINE_SECONDS = 400

# (ranks, directory of models) -> a JSON value
Case = Callable[[Any, Path], Any]
T = TypeVar("T")


def quick_cases(cases: dict[str, T], slow: set[str]) -> dict[str, T]:
    """All cases with SLIME_SLOW=1 (see CONTRIBUTING.md), else those that are not slow."""
    assert slow <= cases.keys()
    return cases if os.environ.get("SLIME_SLOW") else {name: case for name, case in cases.items() if name not in slow}


def run_ranks(script: str, world_size: int, directory: Path, *arguments: str) -> list[str]:
    """`script RANK WORLD_SIZE DIR ARGUMENTS` in `world_size` processes; what each wrote to stderr. script: a name in
    this directory, or a path.

    A failure is for the caller to find in DIR: where one rank fails others fail by it.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # More threads than cores that spin while they wait slow every rank down by an order of magnitude.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    path = str(Path(__file__).parent / script)
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


def run_cases(cases: dict[str, Case]) -> None:
    """Runs a script `RANK WORLD_SIZE DIR MODELS`, which writes what each case returns to DIR/CASE-RANK.json."""
    from slime.trainer.process.collective import Ranks

    rank, world_size, directory, models = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    ranks = Ranks(rank, world_size, f"file://{directory}/rendezvous", 2)
    for name, case in cases.items():
        try:
            result = case(ranks, models)
        except Exception:
            # Whatever is left of the case on the other ranks would wait for this one.
            (directory / f"{name}-{rank}.error").write_text(traceback.format_exc())
            raise
        (directory / f"{name}-{rank}.json").write_text(json.dumps(result))
    ranks.close()


def results_of(script: str, world_size: int, directory: Path, models: Path) -> dict[str, list[Any]]:
    """By case what each rank returned, of a script that calls `run_cases`."""
    errors = run_ranks(script, world_size, directory, str(models))
    failures = [path.read_text() for path in sorted(directory.glob("*.error"))]
    assert not failures, failures[0][-3000:]
    names = {path.stem.rpartition("-")[0] for path in directory.glob("*.json")}
    assert names, errors[0][-3000:]
    return {
        name: [json.loads((directory / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]
        for name in names
    }
