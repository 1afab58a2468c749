"""Runs that are stopped in several ways and resumed equal the run that was left alone: weights, and metrics but times.

Each run takes some 20 s on an idle machine.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from tiny_runs import DEADLINE, descendants, finish, gone, metrics, quickstart, run, timeless, wait_for

pytestmark = pytest.mark.skipif(not os.environ.get("SLIME_SLOW"), reason="slow: SLIME_SLOW=1 runs it")

ROLLOUTS = 6
WEIGHTS = "model/model.safetensors"
BACKENDS = {"fsdp": (), "megatron": ("--train-backend", "megatron")}


@pytest.fixture(scope="module", params=BACKENDS)
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], Path]:
    """(flags of the backend, directory of a run that nothing stopped)."""
    output, flags = tmp_path_factory.mktemp(request.param), BACKENDS[request.param]
    run(output, "--num-rollout", str(ROLLOUTS), *flags)
    return flags, output


def kept(directory: Path, buffer: bool) -> tuple[str, ...]:
    return ("--save-interval", "1", "--run-name", "parts", *(("--buffer-dir", str(directory)) if buffer else ()))


def assert_equal(parts: Path, whole: Path) -> None:
    assert timeless(metrics(parts)) == timeless(metrics(whole))
    assert (parts / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def rows(output: Path) -> int:
    path = output / "metrics.jsonl"
    return path.read_text().count('"perf/step_time"') if path.exists() else 0


def victim(process: psutil.Process, output: Path, name: str) -> psutil.Process:
    if name == "driver":
        return process
    log = str(output / "logs" / f"{name}.log")
    (service,) = [
        p for p in process.children(recursive=True)
        if p.name().startswith("ray::") and log in [file.path for file in p.open_files()]
    ]  # fmt: skip
    return service


def kill(output: Path, name: str, after: int, *flags: str) -> None:
    """Starts a run and kills one of its processes some time after `after` rows."""
    process = quickstart(output, "--num-rollout", "1000", *flags)
    wait_for(lambda: rows(output) >= after or process.poll() is not None, DEADLINE, f"{after} rows")
    children = [child for child in descendants(process) if "Agent" not in " ".join(child.cmdline())]
    wait_for(lambda: rows(output) > after, DEADLINE, "another row") if random.random() < 0.5 else None
    os.kill(victim(psutil.Process(process.pid), output, name).pid, signal.SIGKILL)
    finish(process, 120)
    wait_for(lambda: gone(children), 60, "every process of the run has ended")


@pytest.mark.parametrize("buffer", [False, True], ids=["checkpoint", "buffer"])
def test_two_clean_ends(straight: tuple[tuple[str, ...], Path], tmp_path: Path, buffer: bool) -> None:
    flags, whole = straight
    parts, keep = tmp_path / "parts", (*flags, *kept(tmp_path / "buffer", buffer))
    run(parts, "--num-rollout", "2", *keep)
    for stop in (4, ROLLOUTS):
        run(parts, "--num-rollout", str(stop), *keep, "--load", str(parts / "checkpoints"))
    assert_equal(parts, whole)


@pytest.mark.parametrize("buffer", [False, True], ids=["checkpoint", "buffer"])
@pytest.mark.parametrize("name", ["driver", "trainer-0", "rollout", "buffer"])
def test_a_process_that_was_killed(
    straight: tuple[tuple[str, ...], Path], tmp_path: Path, name: str, buffer: bool
) -> None:
    flags, whole = straight
    parts, keep = tmp_path / "parts", (*flags, *kept(tmp_path / "buffer", buffer))
    kill(parts, name, 2, *keep)
    run(parts, "--num-rollout", str(ROLLOUTS), *keep, "--load", str(parts / "checkpoints"))
    assert_equal(parts, whole)
