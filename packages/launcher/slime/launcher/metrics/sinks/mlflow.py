"""Sends metrics to MLflow: a tracking server, or a database on this machine."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slime.launcher.metrics.sinks.base import Metrics, Sink, TrackedRun
from slime.types.errors import InvalidSetting
from slime.types.settings import setting

# Limits of MLflow's interface.
PARAMETERS_PER_CALL, PARAMETER_LENGTH, METRICS_PER_CALL = 100, 500, 1000
REFUSED_CHARACTERS = re.compile(r"[^\w\-. :/]", re.ASCII)


@dataclass(kw_only=True)
class MlflowSettings:
    """Settings of MLflow."""

    use_mlflow: bool = setting(False, "Send metrics to MLflow (requires the package mlflow)")
    mlflow_tracking_uri: str | None = setting(
        None,
        "URI of the MLflow server, http://..., or of a store, sqlite:///FILE (default: MLFLOW_TRACKING_URI, else "
        "MLflow's own)",
        metavar="URI",
    )
    mlflow_experiment: str = setting(
        "slime", "MLflow experiment of the run; created if it does not exist", metavar="NAME"
    )


def check_mlflow(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for a password in --mlflow-tracking-uri."""
    uri = args["mlflow_tracking_uri"]
    if uri is not None and urlsplit(uri).password is not None:
        raise InvalidSetting(
            "--mlflow-tracking-uri must not contain a password, which every user of the machine could read: set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            field="--mlflow-tracking-uri",
        )


class Mlflow(Sink):
    """One run of MLflow; each start of a run is another, of the same name."""

    def __init__(self, settings: MlflowSettings, run: TrackedRun) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient(tracking_uri=settings.mlflow_tracking_uri)
        experiment = self._client.get_experiment_by_name(settings.mlflow_experiment)
        experiment_id = experiment and experiment.experiment_id
        if experiment_id is None:
            experiment_id = self._client.create_experiment(settings.mlflow_experiment)
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        parameters = [
            self._entities.Param(key, text)
            for key, value in run.config.items()
            if value is not None and len(text := str(value)) <= PARAMETER_LENGTH
        ]
        for begin in range(0, len(parameters), PARAMETERS_PER_CALL):
            self._client.log_batch(self._run_id, params=parameters[begin : begin + PARAMETERS_PER_CALL])

    def write(self, step: int, metrics: Metrics) -> None:
        now = int(time.time() * 1000)
        values = [
            self._entities.Metric(REFUSED_CHARACTERS.sub("_", key), value, now, step) for key, value in metrics.items()
        ]
        for begin in range(0, len(values), METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=values[begin : begin + METRICS_PER_CALL])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
