"""Services that are killed or stopped are started again, and the run ends as the one that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import postgres_server
import psutil
import pytest

import run_databases
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.types.clients import RolloutClient
from slime.types.rpc import RpcSettings
from slow_cases import slow
from tiny_runs import (
    DEADLINE,
    alive,
    command,
    descendants,
    evaluations,
    finish,
    gone,
    metrics,
    processes_with,
    quickstart,
    run,
    services,
    timeless,
    wait_for,
    write_inputs,
)

WEIGHTS = "model/model.safetensors"
# Killed after the first step, the trainer begins anew; stopped after the fourth, it goes on from the checkpoint of the
# third. The steps after that are trained again.
FLAGS = ("--num-rollout", "8", "--save-interval", "3")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nobody disturbs."""
    directory = tmp_path_factory.mktemp("alone")
    run(directory, *FLAGS)
    return directory


def steps(output_dir: Path) -> int:
    path = output_dir / "metrics.jsonl"
    return path.read_text().count('"perf/step_time"') if path.exists() else 0


def service(process: subprocess.Popen[str], output_dir: Path, name: str) -> psutil.Process:
    found: list[psutil.Process] = []

    def look() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[:] = services(descendants(process), output_dir / "logs" / f"{name}.log")
        return bool(found) or process.poll() is not None

    wait_for(look, DEADLINE, f"the process of {name}")
    assert process.poll() is None, finish(process)
    return found[0]


@pytest.fixture
def databases(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Flags of a buffer whose state is in PostgreSQL and whose samples are in an object store."""
    if reason := postgres_server.missing():
        pytest.skip(reason)
    with run_databases.databases(monkeypatch.setenv) as (_, flags):
        yield flags


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


# The fixture of the storage, and the faults: after how many steps, which service, and its signal.
@pytest.mark.parametrize(
    ("storage", "faults"),
    [
        ("", [(1, "rollout", KILL), (2, "buffer", KILL), (4, "rollout", STOP)]),
        ("", [(1, "trainer-0", KILL), (4, "trainer-0", STOP)]),
        pytest.param("databases", [(1, "buffer", KILL), (4, "buffer", STOP)], marks=slow),
    ],
    ids=["rollout", "trainer", "buffer in databases"],
)
def test_services_that_are_killed_and_stopped(
    alone: Path,
    tmp_path: Path,
    storage: str,
    faults: list[tuple[int, str, signal.Signals]],
    request: pytest.FixtureRequest,
) -> None:
    process = quickstart(tmp_path, *FLAGS, *(request.getfixturevalue(storage) if storage else ()))
    family: list[psutil.Process] = []
    whole = 0
    for after, name, number in faults:
        least = max(after, whole)
        wait_for(lambda n=least: steps(tmp_path) >= n or process.poll() is not None, DEADLINE, f"{least} steps")
        victim = service(process, tmp_path, name)
        family += [victim, *victim.children(recursive=True)]
        victim.send_signal(number)
        wait_for(lambda v=victim: not alive(v) or process.poll() is not None, DEADLINE, "the process has ended")
        # The step under way may end without the victim; the one after it needs what was started again.
        whole = steps(tmp_path) + 2
    output = finish(process)
    assert process.returncode == 0, output

    assert gone(family), family
    rows = metrics(tmp_path)
    assert sum(row.get("perf/service_restarts", 0) for row in rows) == len(faults), output
    assert timeless(rows) == timeless(metrics(alone))
    assert timeless(evaluations(tmp_path)) == timeless(evaluations(alone))
    assert (tmp_path / WEIGHTS).read_bytes() == (alone / WEIGHTS).read_bytes()
    assert not (tmp_path / "recovery").exists()
    for _, name, number in faults:
        how = "died" if number == KILL else "was stopped by a signal"
        assert f"{name} {how}, and is started again" in output


def test_an_engine_that_joined_from_outside_is_known_to_the_rollout_service_that_is_started_again(
    tmp_path: Path,
) -> None:
    inputs, out = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    options = EmbeddedOptions(model_path=str(inputs / "model"), threads=1)
    with start_embedded(options) as one, start_embedded(options) as two:
        first, second = (engine.wait_ready(DEADLINE).url for engine in (one, two))
        flags = "--num-rollout", "8", "--rollout-engine", "auto", "--rollout-external-engine-addrs", first
        process = command("train", inputs, out, *flags)
        wait_for(lambda: steps(out) >= 1 or process.poll() is not None, DEADLINE, "a step")
        victim = service(process, out, "rollout")
        access = out / "access"
        address = json.loads((access / "addresses.json").read_text())["rollout"]
        with RolloutClient(address, settings=RpcSettings(token_file=str(access / "train.token"))) as client:
            client.add_engine(second)
        joined = steps(out) + 2
        wait_for(lambda: steps(out) >= joined or process.poll() is not None, DEADLINE, "two steps")
        victim.kill()
        output = finish(process)
    assert process.returncode == 0, output
    rows = metrics(out)
    assert sum(row.get("perf/service_restarts", 0) for row in rows) == 1, output
    assert [row["rollout/engines"] for row in rows[joined:]] == [2] * (8 - joined)


@slow
def test_ctrl_c_while_a_service_is_started_again_leaves_nothing(tmp_path: Path) -> None:
    marked = {"SLIME_TEST_RUN": str(tmp_path)}
    process = quickstart(tmp_path, "--num-rollout", "1000", env=os.environ | marked)
    wait_for(lambda: steps(tmp_path) >= 1 or process.poll() is not None, DEADLINE, "a step")
    victim = service(process, tmp_path, "rollout")
    victim.suspend()
    wait_for(lambda: not alive(victim) or process.poll() is not None, DEADLINE, "the process has ended")
    process.send_signal(signal.SIGINT)
    output = finish(process)
    assert process.returncode == 130, output
    assert "rollout was stopped by a signal, and is started again" in output
    wait_for(lambda: not [p for p in processes_with(marked) if alive(p)], DEADLINE, "every process has ended")
