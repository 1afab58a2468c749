"""Ends of a run before its time: signals, deaths, wrong flags. Nothing may be left behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slow_cases import slow
from tiny_runs import (
    DEADLINE,
    alive,
    command,
    command_line,
    descendants,
    finish,
    gone,
    processes_with,
    quickstart,
    services,
    trained_a_step,
    wait_for,
    write_inputs,
)


@pytest.mark.parametrize(
    "number, code, moment",
    [
        pytest.param(signal.SIGINT, 130, "starting", marks=slow),
        (signal.SIGINT, 130, "training"),
        pytest.param(signal.SIGTERM, 143, "training", marks=slow),
    ],
)
def test_a_signal_stops_everything(tmp_path: Path, number: signal.Signals, code: int, moment: str) -> None:
    process = quickstart(tmp_path)
    log = tmp_path / "logs/rollout.log"
    wait_for(lambda: log.exists() if moment == "starting" else trained_a_step(tmp_path), DEADLINE, moment)
    children = descendants(process)
    assert children
    process.send_signal(number)
    output = finish(process)
    assert process.returncode == code, output
    assert "stopped" in output
    wait_for(lambda: gone(children), DEADLINE, "every process has ended")


# The number of moments of a start that are tried; this variable sets more.
MOMENTS = int(os.environ.get("SLIME_TEST_SIGNAL_MOMENTS", "3"))
ENDINGS = ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129))


@pytest.fixture
def heeded_hang_ups() -> Iterator[None]:
    """Lets SIGHUP end the children of this process also where it is ignored, as under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded_hang_ups")
def test_a_signal_at_any_moment_of_the_start_leaves_nothing(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    seconds = 0.0  # that a start takes, from the first of them
    for moment in range(MOMENTS + 1):
        number, code = ENDINGS[(moment - 1) % len(ENDINGS)]
        run = tmp_path / str(moment)
        marked = {"SLIME_TEST_RUN": str(run)}
        # So many that none ends before its signal, also where the first start was slow and this one is not.
        process = command("train", inputs, run, "--num-rollout", "1000", env=os.environ | marked)
        began = time.monotonic()
        if moment == 0:
            wait_for((run / "logs" / "trainer-0.log").exists, DEADLINE, "the start of the services")
            seconds = time.monotonic() - began
        else:
            delay = seconds * (moment - 1 + random.random()) / MOMENTS
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(delay)
        process.send_signal(number)
        output = finish(process)
        where = f"{number.name} after {time.monotonic() - began:.1f} s of {seconds:.1f}: {output}"
        # Before the command runs at all, the signal does what it does to every process.
        assert process.returncode == code or (process.returncode == -number and not output), where
        assert not (left := [p for p in processes_with(marked) if alive(p)]), (where, left)


def test_without_fault_tolerance_an_engine_that_dies_ends_the_run_with_its_name(tmp_path: Path) -> None:
    process = quickstart(tmp_path, "--no-use-fault-tolerance")
    wait_for(lambda: trained_a_step(tmp_path), DEADLINE, "a step")
    children = descendants(process)
    (engine,) = [p for p in children if "slime.rollout.engines.embedded" in command_line(p)]
    os.kill(engine.pid, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert "EngineError" in output and "embedded-0" in output
    wait_for(lambda: gone(children), DEADLINE, "every process has ended")


@pytest.mark.parametrize("name", [pytest.param("buffer", marks=slow), "trainer-0"])
def test_without_fault_tolerance_a_service_that_dies_ends_the_run_with_its_name(tmp_path: Path, name: str) -> None:
    process = quickstart(tmp_path, "--no-use-fault-tolerance")
    wait_for(lambda: trained_a_step(tmp_path), DEADLINE, "a step")
    children = descendants(process)
    (service,) = services(children, tmp_path / "logs" / f"{name}.log")
    os.kill(service.pid, signal.SIGKILL)
    output = finish(process)
    assert process.returncode == 1, output
    assert f"{name} died" in output
    wait_for(lambda: gone(children), DEADLINE, "every process has ended")


def test_a_wrong_flag_ends_the_run_before_anything_starts(tmp_path: Path) -> None:
    process = quickstart(tmp_path, "--leraning-rate", "1")
    output = finish(process)
    assert process.returncode == 2, output
    assert "unknown option --leraning-rate" in output
    assert not (tmp_path / "logs").exists()
