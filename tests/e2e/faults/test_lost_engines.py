"""A run of two engines, one of which is killed in the middle of generation, ends as the run that was left alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from slime.types.clients import RolloutClient
from slime.types.rpc import RpcSettings
from tiny_runs import (
    DEADLINE,
    command_line,
    descendants,
    evaluations,
    finish,
    metrics,
    quickstart,
    timeless,
    trained_a_step,
    wait_for,
)

RESTARTS = "rollout/engine_restarts"
FLAGS = ("--rollout-num-engines", "2", "--num-rollout", "6")


def test_a_run_whose_engine_is_killed_in_the_middle_of_generation(tmp_path: Path) -> None:
    alone = quickstart(tmp_path / "alone", *FLAGS)
    output = finish(alone)
    assert alone.returncode == 0, output

    out = tmp_path / "killed"
    process = quickstart(out, *FLAGS)
    wait_for(lambda: trained_a_step(out), DEADLINE, "a step")
    engines = [p for p in descendants(process) if "slime.rollout.engines.embedded" in command_line(p)]
    access = out / "access"
    address = json.loads((access / "addresses.json").read_text())["rollout"]
    with RolloutClient(address, settings=RpcSettings(token_file=str(access / "read.token"))) as client:
        stop_while_it_generates(client, engines).kill()
    output = finish(process)
    assert process.returncode == 0, output

    log = (out / "logs" / "rollout.log").read_text()
    (in_flight,) = re.findall(
        r"engine embedded-1 is lost and is being started again; its requests in flight \((\d+) samples?\)", log
    )
    assert int(in_flight) > 0, log
    # --tiny sets --deterministic: what the engine had in flight waited for its successor, which had the same weights.
    rows = metrics(out)
    assert sum(row.pop(RESTARTS, 0) for row in rows) == 1
    assert timeless(rows) == timeless(metrics(tmp_path / "alone"))
    assert timeless(evaluations(out)) == timeless(evaluations(tmp_path / "alone"))


def stop_while_it_generates(client: RolloutClient, engines: Sequence[psutil.Process]) -> psutil.Process:
    """Stops the second engine while it has requests, so that it cannot answer them any more."""
    port = urlsplit(client.status().engines[1].url).port
    (engine,) = [p for p in engines if port in {c.laddr.port for c in p.net_connections("tcp")}]
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if not client.status().engines[1].in_flight:
            continue
        engine.suspend()
        # An answer that was on its way arrives within this time.
        began = time.monotonic()
        while client.status().engines[1].in_flight:
            if time.monotonic() - began > 1:
                return engine
        engine.resume()
    raise AssertionError("no engine was seen to generate")
