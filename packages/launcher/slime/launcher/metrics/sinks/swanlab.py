"""Sends metrics to SwanLab."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from slime.launcher.metrics.sinks.base import Metrics, Sink, TrackedRun
from slime.types.settings import setting


@dataclass(kw_only=True)
class SwanlabSettings:
    """Settings of SwanLab."""

    use_swanlab: bool = setting(False, "Send metrics to SwanLab (requires the package swanlab)")
    swanlab_project: str = setting("slime", "SwanLab project of the run", metavar="NAME")
    swanlab_workspace: str | None = setting(
        None,
        "SwanLab workspace that the project belongs to (default: that of the key in SWANLAB_API_KEY)",
        metavar="NAME",
    )
    swanlab_mode: str | None = setting(
        None,
        "Mode of SwanLab: send metrics, keep them in files below --output-dir, for its own viewer or to be sent later, "
        "or do nothing (default: online)",
        choices=("online", "local", "offline", "disabled"),
    )


class Swanlab(Sink):
    """One run of SwanLab; each start of a run is another, of the same name."""

    def __init__(self, settings: SwanlabSettings, run: TrackedRun) -> None:
        directory = run.output_dir / "swanlog"
        directory.mkdir(parents=True, exist_ok=True)
        swanlab = importlib.import_module("swanlab")
        # In the main thread it would take Ctrl-C from the run, and could not be closed from another thread.
        with ThreadPoolExecutor(1) as threads:
            self._run = threads.submit(
                swanlab.init,
                project=settings.swanlab_project,
                workspace=settings.swanlab_workspace,
                name=run.name,
                config=dict(run.config),
                log_dir=str(directory),
                mode=settings.swanlab_mode,
            ).result()

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish("crashed" if failed else "success")
