"""Sends metrics to Trackio: a dashboard on this machine, or in a Hugging Face Space."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from slime.launcher.metrics.sinks.base import Metrics, Sink, TrackedRun
from slime.types.settings import setting


@dataclass(kw_only=True)
class TrackioSettings:
    """Settings of Trackio."""

    use_trackio: bool = setting(False, "Send metrics to Trackio (requires the package trackio)")
    trackio_project: str = setting("slime", "Trackio project of the run", metavar="NAME")
    trackio_space_id: str | None = setting(
        None,
        "Hugging Face Space OWNER/NAME that shows the run, with HF_TOKEN in the environment (default: "
        "TRACKIO_SPACE_ID, else files in TRACKIO_DIR on this machine)",
        metavar="OWNER/NAME",
    )


class Trackio(Sink):
    """One run of Trackio; each start of a run is another, of the same name."""

    def __init__(self, settings: TrackioSettings, run: TrackedRun) -> None:
        self._run = importlib.import_module("trackio").init(
            project=settings.trackio_project,
            name=run.name,
            space_id=settings.trackio_space_id,
            config=dict(run.config),
            embed=False,
        )

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()
