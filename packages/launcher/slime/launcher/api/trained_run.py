"""`TrainedRun`: the results of a run, read from its directory."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.metrics.files import is_evaluation, read_metrics
from slime.launcher.run_directory.earlier_run import MODEL
from slime.launcher.run_directory.kept_samples import kept_files, read_rows
from slime.launcher.run_directory.state import read_state
from slime.types.errors import MissingFile


@dataclass(frozen=True)
class TrainedRun:
    """Results of the run in `path`. Tables are pandas DataFrames if pandas is installed, otherwise lists of dicts."""

    path: Path

    @property
    def metrics(self) -> Any:
        """Metrics of the run, one row per iteration."""
        return _table([row for row in self._rows() if not is_evaluation(row)])

    @property
    def evaluations(self) -> Any:
        """Scores of the evaluations, one row each; `step` is the number of iterations before the evaluation."""
        return _table([row for row in self._rows() if is_evaluation(row)])

    @property
    def samples(self) -> Any:
        """Samples that the run has kept (`log_samples`), one row each."""
        return _table([row for file in kept_files(self.path) for row in read_rows(file.path)])

    @property
    def model_dir(self) -> Path:
        """The Hugging Face directory of the trained model. Raises MissingFile if the run has not written one."""
        if not (self.path / MODEL).is_dir():
            raise MissingFile(f"{self.path} has no trained model", field="model_dir", value=str(self.path / MODEL))
        return self.path / MODEL

    @property
    def state(self) -> str:
        """State of the run: "running", "done", "stopped", "failed" or "unknown"."""
        return read_state(self.path).state

    def _rows(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        return read_metrics(path) if path.is_file() else []


def _table(rows: list[dict[str, Any]]) -> Any:
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        return rows
    return pandas.DataFrame(rows)
