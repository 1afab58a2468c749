"""Engines give their memory to the trainer, unless it has told that it needs none of it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.launcher.loops.services import Services
from slime.launcher.placement.plan import Placement


class Rollout:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def offload(self, timeout: float) -> None:
        self.calls.append("offload")

    def onload(self, parts: list[str], timeout: float) -> None:
        self.calls.append("onload")


class Trainer:
    def __init__(self) -> None:
        self.stays = 0.0

    def update_weights(self, version: int, timeout: float) -> dict[str, float]:
        return {"perf/train_memory_stays": self.stays}


@pytest.mark.parametrize(
    ("offload_rollout", "turns"),
    [(None, [True, True, False, False, True]), (True, [True] * 5)],
    ids=["default", "--offload-rollout"],
)
def test_engines_keep_their_memory_while_the_trainer_needs_none_of_it(
    tmp_path: Path, offload_rollout: bool | None, turns: list[bool]
) -> None:
    numbers = dict(
        start_timeout_seconds=1.0, rollout_engine_start_seconds=1.0, stop_grace_seconds=1.0, update_timeout_seconds=1.0
    )
    config: Any = SimpleNamespace(
        launcher=SimpleNamespace(**numbers, log_samples=1),
        rollout=SimpleNamespace(**numbers, offload_rollout=offload_rollout),
        flat={},
        has_engines=True,
    )
    services: Any = Services(config, Placement(1, offloads=True), tmp_path, lambda *_: None)
    rollout, trainer = Rollout(), Trainer()
    services._ranks.clients = [trainer]
    services._connect_engines(rollout, restarts_engines=False)
    seen = []
    for stays in (0.0, 1.0, 1.0, 0.0, 0.0):
        rollout.calls.clear()
        trainer.stays = stays
        metrics = services.offload() | services.onload()
        services.update_weights(1)
        assert rollout.calls == (["offload", "onload"] if metrics else [])
        seen.append(bool(metrics))
    assert seen == turns
