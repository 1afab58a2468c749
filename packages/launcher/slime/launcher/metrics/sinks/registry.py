"""Trackers of metrics that settings can choose, and the sinks of one run."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.metrics.sinks.base import Guarded, Sink, TrackedRun, described
from slime.launcher.metrics.sinks.mlflow import Mlflow, MlflowSettings, check_mlflow
from slime.launcher.metrics.sinks.swanlab import Swanlab, SwanlabSettings
from slime.launcher.metrics.sinks.tensorboard import TensorBoard
from slime.launcher.metrics.sinks.trackio import Trackio, TrackioSettings
from slime.launcher.metrics.sinks.wandb import Wandb, WandbSettings, check_wandb
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.setting_values import flag_name, is_json
from slime.types.settings import flag_names

log = logging.getLogger(__name__)

# Settings that no tracker gets: environments hold keys.
PRIVATE = ("train_env_vars",)


@dataclass(frozen=True)
class Tracker:
    """A tracker that `--use-NAME` chooses. NAME is also its package, and the extra that installs it."""

    name: str
    settings: type
    open: Callable[[Any, TrackedRun], Sink]
    check: Callable[[Mapping[str, Any]], None] | None = None

    @property
    def switch(self) -> str:
        return f"use_{self.name}"


TRACKERS = (
    Tracker("wandb", WandbSettings, Wandb, check_wandb),
    Tracker("trackio", TrackioSettings, Trackio),
    Tracker("mlflow", MlflowSettings, Mlflow, check_mlflow),
    Tracker("swanlab", SwanlabSettings, Swanlab),
)


@dataclass(kw_only=True)
class TrackerSettings(WandbSettings, TrackioSettings, MlflowSettings, SwanlabSettings):
    """Settings of all trackers."""


def check_trackers(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for a tracker's settings without --use-NAME, NotAvailable without its package."""
    for name in ("tb_project_name", "tb_experiment_name"):
        path = Path(args[name] or "")
        if path.is_absolute() or ".." in path.parts:
            raise InvalidSetting.must_be(flag_name(name), "a name below tensorboard/, without ..", got=args[name])
    for tracker in TRACKERS:
        flag = flag_name(tracker.switch)
        if args[tracker.switch]:
            if importlib.util.find_spec(tracker.name) is None:
                raise NotAvailable.not_installed(flag, tracker.name, f"slime-launcher[{tracker.name}]")
            if tracker.check is not None:
                tracker.check(args)
            continue
        for field in dataclasses.fields(tracker.settings):
            value = args[field.name]
            if value != field.default:
                typed = flag_names(field)[0]
                raise InvalidSetting.requires(typed if isinstance(value, bool) else f"{typed} {value}", flag)


def open_sinks(
    settings: TrackerSettings, run: TrackedRun, tensorboard_dir: Path | None, *, required: bool = True
) -> list[Sink]:
    """Returns the sinks of a run, each guarded.

    tensorboard_dir: where events go (None: no events).
    required: raise InvalidSetting for a tracker that cannot be started; otherwise it is logged and left out.
    """
    opened: list[Sink] = []
    if tensorboard_dir is not None:
        opened.append(Guarded("--use-tensorboard", TensorBoard(tensorboard_dir)))
    for tracker in TRACKERS:
        flag = flag_name(tracker.switch)
        if not getattr(settings, tracker.switch):
            continue
        try:
            opened.append(Guarded(flag, tracker.open(settings, run)))
        except Exception as error:
            if not required:
                log.warning("%s: %s; the run goes on without it", flag, described(error))
                continue
            for sink in opened:
                sink.close(failed=True)
            raise InvalidSetting(f"{flag}: {described(error)}", field=flag, value=True) from error
    return opened


def shown_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that trackers show: those that JSON can hold, without private ones."""
    return {key: value for key, value in flat.items() if key not in PRIVATE and is_json(value)}
