"""Engines of more GPUs than a node has: where their parts meet, and what each node is told."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from slime.launcher.config import run_config
from slime.launcher.placement.plan import plan_placement
from slime.launcher.services.actors import ServiceActor
from slime.launcher.services.start import _Start
from slime.launcher.services.supervisor import Process
from slime.rollout.engines.kind import EngineNode
from slime.rollout.settings.rollout import RolloutSettings

NUM_GPUS = 0


class Answers:
    """In place of a Supervisor: calls of actors answer at once, and starts are noted."""

    def __init__(self) -> None:
        self.settings: list[RolloutSettings] = []
        self.options: list[dict[str, Any]] = []

    def get(self, process: Any, reference: Any) -> Any:
        return reference

    def start_each(self, processes: Any, module: str, settings: Any, rpc: Any, options: Any) -> None:
        self.settings, self.options = settings, options

    def watch(self, process: Any, reference: Any) -> None:
        return None

    def call_all(self, functions: Any) -> list[Any]:
        return [function() for function in functions]


def host(number: int) -> Process:
    address = f"10.0.0.{number}"

    def remote(answer: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments: answer)

    actor = SimpleNamespace(
        meeting_point=remote(f"{address}:7000"), watch_engines=remote(None), engines=remote([address])
    )
    return Process(f"engines-{number}", actor, watch=None, host=address)


@pytest.mark.parametrize("engine", ["auto", "sglang"])
def test_the_nodes_of_an_engine_meet_at_its_first(engine: str) -> None:
    words = ["--hf-checkpoint", "m", "--prompt-data", "p", "--num-rollout", "1", "--colocate", "--actor-num-nodes", "4"]
    words += ["--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "16", "--rollout-engine", engine]
    config = run_config.parse(words, check=False, environment={})
    placement = plan_placement(config.launcher, config.rollout, [8] * 4)
    supervisor = Answers()
    hosts = [host(number) for number in range(4)]
    engines = _Start(config, placement, supervisor)._start_engines(hosts)  # type: ignore[arg-type]
    assert engines == [each.host for each in hosts]
    assert [options["node"] for options in supervisor.options] == [
        EngineNode(2, 0, "10.0.0.0:7000"), EngineNode(2, 1, "10.0.0.0:7000"),
        EngineNode(2, 0, "10.0.0.2:7000"), EngineNode(2, 1, "10.0.0.2:7000"),
    ]  # fmt: skip
    assert [options["first"]["sglang"] for options in supervisor.options] == [0, 0, 1, 1]
    assert [each.rollout_engine_host for each in supervisor.settings] == [each.host for each in hosts]


def test_a_meeting_point_has_free_ports_behind_it() -> None:
    actor = object.__new__(ServiceActor)
    actor.host = "127.0.0.1"
    address, _, port = actor.meeting_point(8).rpartition(":")
    for number in range(8):
        with socket.socket() as probe:
            probe.bind((address, int(port) + number))
