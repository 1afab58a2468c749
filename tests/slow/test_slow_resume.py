"""Runs that are stopped in several ways and resumed equal the run that was left alone: weights, and metrics but times.

Each run takes some 20 s on an idle machine.
"""

from __future__ import annotations

import random
import subprocess
from contextlib import suppress
from pathlib import Path

import postgres_server
import psutil
import pytest

import run_databases
from slow_cases import slow
from tiny_runs import (
    DEADLINE,
    command_line,
    descendants,
    finish,
    gone,
    metrics,
    quickstart,
    run,
    services,
    timeless,
    wait_for,
)

pytestmark = slow

ROLLOUTS = 12
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


def victims(process: psutil.Process, output: Path, name: str) -> list[psutil.Process]:
    """The process of that name, once it has been started."""
    if name == "driver":
        return [process]
    return services(process.children(recursive=True), output / "logs" / f"{name}.log")


def kill(output: Path, name: str, after: int, *flags: str) -> None:
    """Starts a run and kills one of its processes after `after` rows, or one more."""
    # Otherwise the process is started again, and the run goes on.
    process = quickstart(output, "--num-rollout", "1000", "--no-use-fault-tolerance", *flags)
    driver = psutil.Process(process.pid)
    started = f"the start of {name}"
    wait_for(lambda: process.poll() is not None or bool(victims(driver, output, name)), DEADLINE, started)
    assert process.poll() is None, finish(process)
    # Looked for now: later the run must not go on meanwhile, as far as the one that it is compared with.
    found = victims(driver, output, name)
    after += random.randrange(2)
    wait_for(lambda: rows(output) >= after or process.poll() is not None, DEADLINE, f"{after} rows")
    assert process.poll() is None, finish(process)
    # The agents of a Ray whose driver was killed end by themselves, a minute later.
    children = [child for child in descendants(process) if "Agent" not in command_line(child)]
    found[0].kill()
    finish(process)
    wait_for(lambda: gone(children), DEADLINE, "every process of the run has ended")


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


@pytest.mark.parametrize("buffer", [False, True], ids=["checkpoint", "buffer"])
@pytest.mark.parametrize("names", [("rollout", "buffer"), ("buffer", "rollout")], ids="-then-".join)
def test_a_resume_that_was_killed_as_well(
    straight: tuple[tuple[str, ...], Path], tmp_path: Path, names: tuple[str, str], buffer: bool
) -> None:
    flags, whole = straight
    parts, keep = tmp_path / "parts", (*flags, *kept(tmp_path / "buffer", buffer))
    kill(parts, names[0], 1, *keep)
    load = ("--load", str(parts / "checkpoints"))
    kill(parts, names[1], 3, *keep, *load)
    run(parts, "--num-rollout", str(ROLLOUTS), *keep, *load)
    assert_equal(parts, whole)


# Queries that see a moment at which the whole run is killed.
MOMENTS = {
    "groups are generated": "SELECT 1 FROM groups WHERE state = 'leased' LIMIT 1",
    "a step is trained": "SELECT 1 FROM steps WHERE state = 'sealed' LIMIT 1",
    "a step waits for its checkpoint": "SELECT 1 FROM steps WHERE state = 'acknowledged' LIMIT 1",
}


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kills a run and everything below it; none of them sees another one die."""
    family = [psutil.Process(process.pid)]
    for each in family:
        # Stopped, it starts nothing more.
        with suppress(psutil.NoSuchProcess):
            each.suspend()
            family += each.children()
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    finish(process)
    wait_for(lambda: gone(family), DEADLINE, "every process of the run has ended")


def killed_whole(output: Path, moment: str, server: postgres_server.PostgresServer, *flags: str) -> None:
    """Starts or resumes a run, and kills all of it at a moment after two more steps."""
    process = quickstart(output, *flags)
    least = rows(output) + 2
    wait_for(lambda: rows(output) >= least or process.poll() is not None, DEADLINE, f"{least} rows")
    query = MOMENTS[moment]
    wait_for(lambda: process.poll() is not None or bool(server.execute(query, run_databases.SCHEMA)), DEADLINE, moment)
    assert process.poll() is None, finish(process)
    kill_all(process)


def test_a_run_with_its_buffer_in_databases_that_is_killed_as_a_whole(
    straight: tuple[tuple[str, ...], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := postgres_server.missing():
        pytest.skip(reason)
    flags, whole = straight
    parts = tmp_path / "parts"
    with run_databases.databases(monkeypatch.setenv) as (server, databases):
        words = ("--num-rollout", str(ROLLOUTS), *flags, *kept(tmp_path, False), *databases)
        load: tuple[str, ...] = ()
        for moment in MOMENTS:
            killed_whole(parts, moment, server, *words, *load)
            load = ("--load", str(parts / "checkpoints"))
        run(parts, *words, *load)
        committed = server.execute("SELECT count(*) FROM steps WHERE state = 'committed'", run_databases.SCHEMA)
    assert committed == [(ROLLOUTS,)]
    assert_equal(parts, whole)
