"""Checkpoints that a restart of the trainer needs outlive --save-keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from slime.launcher.config import run_config
from slime.launcher.faults.restart_points import RestartPoints
from slime.launcher.faults.run_repairs import RunRepairs
from slime.launcher.loops.services import Services
from slime.launcher.services.supervisor import Supervisor
from slime.types.directories import whole_directory


def checkpoint(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_directory(path, "slime-trainer") as directory:
        (directory / "trainer.json").write_text("{}")
    return path


@pytest.fixture
def repairs(tmp_path: Path) -> Iterator[RunRepairs]:
    config = run_config.parse(["--hf-checkpoint", "m", "--prompt-data", "p", "--num-rollout", "1"], check=False)
    repairs = RunRepairs(config, Supervisor(tmp_path, start_seconds=1.0, stop_seconds=1.0), tmp_path)
    yield repairs
    repairs.close()


def saved(repairs: RunRepairs, directory: Path, step: int) -> list[str]:
    """Saves after `step` with --save-keep 1; returns the checkpoints that there are then."""
    settings = {"save_keep": 1, "save_retain_interval": None, "train_backend": "fsdp"}
    run = MagicMock(**{f"_settings.{name}": value for name, value in settings.items()}, _repairs=repairs, trained=step)
    run._ranks.each.side_effect = lambda call: checkpoint(directory / f"step_{step:06d}")
    Services.save(run, step, directory, None)
    return sorted(path.name for path in directory.iterdir())


def test_the_start_of_a_run_is_kept_until_there_is_a_later_state_to_restart_from(
    repairs: RunRepairs, tmp_path: Path
) -> None:
    own = tmp_path / "checkpoints"
    # With --no-save-optim no checkpoint of the run is a restart point.
    load = str(checkpoint(own / "step_000001"))
    repairs.points = RestartPoints(
        tmp_path, first=1, load=load, backend="fsdp", checkpoints=None, interval_seconds=0, clock=lambda: 0.0
    )
    assert saved(repairs, own, 3) == ["step_000001", "step_000003"]
    path = repairs.points.due(4)
    assert path is not None
    repairs.points.written(checkpoint(path), seconds=0.0)
    assert saved(repairs, own, 5) == ["step_000005"]


def test_a_checkpoint_between_two_updates_of_the_reference_does_not_take_the_place_of_the_last_whole_one(
    repairs: RunRepairs, tmp_path: Path
) -> None:
    own = tmp_path / "checkpoints"
    repairs.points = RestartPoints(
        tmp_path, first=-1, load=None, backend="fsdp", checkpoints=own, interval_seconds=1e9, multiple_of=4
    )
    assert saved(repairs, own, 3) == ["step_000003"]
    assert saved(repairs, own, 5) == ["step_000003", "step_000005"]
    assert saved(repairs, own, 7) == ["step_000007"]
