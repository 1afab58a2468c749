"""Starts the processes of one trainer, each running a script of this directory.

    python trainer_processes.py

runs what forks them: importing torch, megatron-core and transformers takes each several seconds, and this process does
it once for all ranks of a test process.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

DEADLINE_SECONDS = 400
PRELOADED = ("slime.trainer.backends.fsdp.backend", "slime.trainer.backends.megatron.backend", "slime.trainer.trainer")

# (ranks, directory of models) -> a JSON value
Case = Callable[[Any, Path], Any]
T = TypeVar("T")


def quick_cases(cases: dict[str, T], slow: set[str]) -> dict[str, T]:
    """All cases with SLIME_SLOW=1 (see CONTRIBUTING.md), else those that are not slow."""
    assert slow <= cases.keys()
    return cases if os.environ.get("SLIME_SLOW") else {name: case for name, case in cases.items() if name not in slow}


def run_ranks(script: str, world_size: int, directory: Path, *arguments: str, check: bool = False) -> list[str]:
    """Runs `script RANK WORLD_SIZE DIR ARGUMENTS` in `world_size` processes; returns what each wrote, and how it ended.

    script: a name in this directory, or a path. check: whether to fail where a rank ends with another code than 0.
    Otherwise a failure is for the caller to find in DIR: where one rank fails others fail by it.
    """
    path = str(Path(__file__).parent / script)
    words = [[path, str(rank), str(world_size), str(directory), *arguments] for rank in range(world_size)]
    server = _server()
    print(json.dumps({"ranks": words, "directory": str(directory)}), file=server.stdin, flush=True)
    answer = server.stdout.readline()
    assert answer, "the process that forks ranks has ended"
    codes = json.loads(answer)
    outputs = [f"{(directory / f'output-{rank}').read_text()}\nexit code {code}" for rank, code in enumerate(codes)]
    if check and any(codes):
        first = next(rank for rank, code in enumerate(codes) if code)
        raise AssertionError(f"ranks ended with {codes}, rank {first} after {outputs[first][-3000:]}")
    return outputs


@functools.cache
def _server() -> Any:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # More threads than cores that spin while they wait slow every rank down by an order of magnitude.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(server.terminate)
    return server


def _serve() -> None:
    """Forks the ranks of each line on stdin, and answers with their exit codes when all have ended.

    Ends them at the deadline, at SIGTERM and SIGINT, and when the test process is gone.
    """
    # Modules may print while they are imported, which is no answer.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tests = os.getppid()
    for name in PRELOADED:
        importlib.import_module(name)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            request = json.loads(line)
            outputs = [Path(request["directory"]) / f"output-{rank}" for rank in range(len(request["ranks"]))]
            pids = list(map(_fork, request["ranks"], outputs))
            print(json.dumps(_codes(pids, tests)), file=answers, flush=True)


def _codes(pids: list[int], tests: int) -> list[int]:
    """Returns the exit codes of ranks, those of signals negative. tests: the process that asked for them."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while len(codes) < len(pids) and time.monotonic() < deadline and os.getppid() == tests:
            for pid in pids:
                if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(ended[1])
            time.sleep(0.02)
    finally:
        for pid in pids:
            if pid not in codes:
                os.kill(pid, signal.SIGKILL)
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in pids]


def _fork(words: list[str], output: Path) -> int:
    """Runs a script with its arguments in a copy of this process, and returns the id of the copy.

    output: the file that gets what it writes to stdout and stderr.
    """
    if pid := os.fork():
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        with output.open("w") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
            os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(os.open(os.devnull, os.O_RDWR), sys.stdin.fileno())
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        try:
            runpy.run_path(words[0], run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(status)


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
    outputs = run_ranks(script, world_size, directory, str(models))
    failures = [path.read_text() for path in sorted(directory.glob("*.error"))]
    assert not failures, "\n".join(failure[-1500:] for failure in failures)
    results: dict[str, dict[int, Any]] = {}
    for path in directory.glob("*.json"):
        name, _, rank = path.stem.rpartition("-")
        results.setdefault(name, {})[int(rank)] = json.loads(path.read_text())
    # A rank that a signal ended, or that met no other, has left no error of a case.
    whole = results and all(len(ranks) == world_size for ranks in results.values())
    assert whole, f"ranks wrote {results}\n" + "\n".join(output[-1000:] for output in outputs)
    return {name: [ranks[rank] for rank in range(world_size)] for name, ranks in results.items()}


if __name__ == "__main__":
    _serve()
