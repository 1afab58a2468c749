"""Ranks that are started again train the steps after their state, the one that they answered last included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slime.launcher.faults.restart_points import RestartPoints
from slime.launcher.faults.restarts import ServiceRestarts, TrainerReplay
from slime.launcher.services.processes import Process
from slime.launcher.services.supervisor import Supervisor
from slime.trainer.settings.trainer import TrainerSettings


class RankSupervisor(Supervisor):
    """A supervisor of a rank that is no process; `calls` are the functions to run when it is ended or started."""

    def __init__(self, log_dir: Path, calls: dict[str, Callable[[], None]]) -> None:
        super().__init__(log_dir, start_seconds=1.0, stop_seconds=1.0)
        self._processes.append(Process("trainer-0", None, None, "127.0.0.1"))
        self.calls = calls

    def end(self, processes: Sequence[Process]) -> None:
        self.calls.get("end", int)()

    def spawn_again(self, processes: Sequence[Process]) -> None: ...

    def start_again(self, processes: Sequence[Process], **changes: Any) -> None:
        self.calls.get("start", int)()


class Rank:
    address = "127.0.0.1:1"

    def __init__(self, calls: dict[str, Callable[[], None]]) -> None:
        self.steps: list[int] = []
        self.calls = calls

    def is_serving(self, timeout: float) -> bool:
        return True

    def rewind_steps(self, last_step: int) -> None:
        self.steps.append(-last_step)

    def train_step(self, step: int, num_groups: int, timeout: float) -> None:
        self.steps.append(step)
        self.calls.get("train", int)()


@pytest.mark.parametrize("moment", ["end", "start", "train"])
def test_a_step_that_is_counted_while_the_ranks_are_started_again_is_trained_again(tmp_path: Path, moment: str) -> None:
    trained = [6]
    # The ranks answered for step 7 before they were killed; the loop, in its own thread, notes it at `moment`.
    calls = {moment: lambda: trained.__setitem__(0, 7)}
    points = RestartPoints(tmp_path, first=4, load=None, backend="fsdp", checkpoints=None, interval_seconds=0)
    rank = Rank(calls)
    ranks: list[Any] = [rank]
    settings = TrainerSettings(hf_checkpoint="model")
    replay = TrainerReplay(points, settings, ranks, lambda: trained[0], lambda step: 1, 1.0)
    supervisor = RankSupervisor(tmp_path, calls)
    ServiceRestarts(supervisor, rank, None, replay, lambda: None).start_again({"trainer-0": "died"})  # type: ignore[arg-type]
    assert rank.steps == [-4, 5, 6, 7]
