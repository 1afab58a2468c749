"""Reads a run's directory: metrics, settings, state and kept samples, while the run writes them and afterwards."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from slime.launcher.config.record import COMMAND, SETTINGS
from slime.launcher.metrics.files import is_evaluation
from slime.launcher.metrics.report import REWARD, evaluation_scores
from slime.launcher.run_directory.earlier_run import MODEL
from slime.launcher.run_directory.kept_samples import DIRECTORY, KeptFile, kept_files
from slime.launcher.run_directory.state import FILE as STATE
from slime.launcher.run_directory.state import RunStatus, read_state
from slime.types.errors import InvalidSetting
from slime.types.files import open_regular, read_regular

METRICS = "metrics.jsonl"
MARKS = (SETTINGS, METRICS, STATE)
# Depth of directories in which runs are searched.
DEPTH = 3
# Number of last steps whose mean reward a list of runs shows.
LAST = 3
LOG_TAIL_BYTES = 64 << 10
LOG_LINES = 30
MOST_SETTINGS_BYTES = 4 << 20
# A directory that changed so recently is listed again.
LISTING_NS = 2 * 10**9
# The largest whole number that a browser reads exactly.
MOST_STEP = 2**53 - 1


def is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in MARKS)


def find_runs(directory: Path) -> list[Path]:
    """Returns the runs below `directory`, which may itself be one, sorted by name."""
    runs: list[Path] = []

    def visit(path: Path, depth: int) -> None:
        if not os.access(path, os.R_OK | os.X_OK):
            return
        if is_run(path):
            runs.append(path)
        elif depth:
            for child in sorted(path.iterdir()):
                if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
                    visit(child, depth - 1)

    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "no such directory"
        raise InvalidSetting(
            f"DIR {directory}: {problem}; name the directory that holds the output directories of your runs",
            field="DIR", value=str(directory), expected="a directory with runs",
        )  # fmt: skip
    visit(directory, DEPTH)
    return runs


class RunFiles:
    """The files of one run. Thread-safe; nothing is read twice."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Raises InvalidSetting if `path` holds no run. name: how to show the run (default: its directory's name)."""
        if not is_run(path):
            found = "there is no such directory"
            if path.exists():
                found = f"it has none of {', '.join(MARKS)}" if path.is_dir() else "it is not a directory"
            if path.is_dir() and find_runs(path):
                found += f"; slime runs {shlex.quote(str(path))} lists the runs below it"
            raise InvalidSetting(
                f"{path}: not the directory of a run: {found}", field="RUN", value=str(path), expected="a run"
            )
        self.path = path
        # A name that is not UTF-8 could be neither printed nor put into the page.
        self.name = (name or path.resolve().name).encode("utf-8", "replace").decode()
        self._lock = threading.Lock()
        self._steps: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._read_to = 0
        self._kept: list[KeptFile] = []
        self._kept_at: int | None = None
        self._places: dict[tuple[int, bool], KeptFile] = {}
        self._identity: tuple[int, int] | None = None
        # Raised when the run starts its metrics over, so that readers of the old ones start over too.
        self.edition = 0

    def steps(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl so far, without evaluations. The rows must not be changed."""
        return self.edition_and_steps()[1]

    def edition_and_steps(self) -> tuple[int, list[dict[str, Any]]]:
        """Returns the edition and its rows so far; other threads may read further rows meanwhile."""
        with self._lock:
            self._read_on()
            return self.edition, self._steps[:]

    def evaluations(self) -> list[dict[str, Any]]:
        with self._lock:
            self._read_on()
            return self._evaluations[:]

    def _read_on(self) -> None:
        try:
            with open_regular(self.path / METRICS) as file:
                status = os.fstat(file.fileno())
                # A run that resumes writes another file in its place.
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._read_to:
                    self._identity, self._read_to = (status.st_dev, status.st_ino), 0
                    self._steps, self._evaluations = [], []
                    self.edition += 1
                file.seek(self._read_to)
                data = file.read()
        except OSError:
            # As with every other file of a run: one that cannot be read does not hide the rest.
            return
        # The last line may still be incomplete.
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.splitlines():
            row = _row(line)
            if row is not None:
                (self._evaluations if is_evaluation(row) else self._steps).append(row)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting of the run by its name."""
        return self.explicit | self._settings_text[1]

    @cached_property
    def explicit(self) -> dict[str, Any]:
        """The settings that a flag, a file or the environment gave."""
        return self._settings_text[0]

    @cached_property
    def _settings_text(self) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            with open_regular(self.path / SETTINGS) as file:
                text = file.read(MOST_SETTINGS_BYTES).decode("utf-8", "replace")
        except OSError:
            return {}, {}
        # The settings with their defaults, and the run's own name, are comments of the file.
        comments = [line[2:] for line in text.splitlines() if re.match(r"# (\w+:|- | )", line)]
        return _yaml(text), _yaml("\n".join(comments))

    @property
    def state(self) -> RunStatus:
        """The recorded state; without one, done if the run has written its model, which it does at its end."""
        state = read_state(self.path)
        if state.state == "unknown" and (self.path / MODEL).is_dir():
            return RunStatus(state="done")
        return state

    @cached_property
    def asynchronous(self) -> bool:
        try:
            lines = read_regular(self.path / COMMAND).decode("utf-8", "replace").splitlines()
        except OSError:
            return False
        return bool(lines) and lines[-1].startswith("slime train-async")

    @property
    def model(self) -> str:
        return Path(str(self.settings.get("hf_checkpoint") or "")).name

    def kept(self) -> list[KeptFile]:
        """Returns the files of kept samples, in a list that must not be changed."""
        try:
            modified = (self.path / DIRECTORY).stat().st_mtime_ns
        except OSError:
            return []
        # The listing is kept while the directory's time does not change. A file that came within one tick of the clock
        # after the listing would not change that time.
        if modified != self._kept_at or time.time_ns() - modified < LISTING_NS:
            self._kept = kept_files(self.path)
            self._places = {(file.step, file.evaluation): file for file in self._kept}
            self._kept_at = modified
        return self._kept

    def kept_at(self, step: int, *, evaluation: bool) -> KeptFile | None:
        self.kept()
        return self._places.get((step, evaluation))

    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """Returns [(iterations before the evaluation, score), ...] of each evaluation set, in order."""
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.evaluations():
            for name, value in evaluation_scores(row).items():
                if (score := finite(value)) is not None:
                    found.setdefault(name, []).append((row["step"], score))
        return found

    def reward(self) -> float | None:
        """Returns the mean reward of the last steps."""
        values = [value for row in self.steps()[-LAST:] if (value := finite(row.get(REWARD))) is not None]
        return sum(values) / len(values) if values else None

    def started(self) -> float | None:
        """Returns when the run started, in seconds since 1970; without state.json, when its oldest known file was
        written; None if that is unknown."""
        started = self.state.started
        if started is None:
            for name in MARKS:
                if (self.path / name).exists():
                    return (self.path / name).stat().st_mtime
        return started

    def failures(self) -> list[dict[str, Any]]:
        """Returns the last error in the log of each service, with the lines that follow it."""
        last_errors = []
        for path in sorted((self.path / "logs").glob("*.log")):
            # A pipe would wait for its writer.
            if not path.is_file() or not os.access(path, os.R_OK):
                continue
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
            marks = [n for n, line in enumerate(lines) if re.search(r"\bERROR\b|Traceback|\bCRITICAL\b", line)]
            if marks:
                last_errors.append({"log": path.name, "lines": lines[marks[-1] :][:LOG_LINES]})
        return last_errors


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and 0 <= step <= MOST_STEP else None


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases, which a run never writes: a few lines of them can expand to more text than fits into memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def _yaml(text: str) -> dict[str, Any]:
    try:
        found = yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        # ValueError: a date that does not exist.
        return {}
    return found if isinstance(found, dict) else {}


def finite(value: Any) -> float | None:
    """Returns `value` as a float, or None if it is not a finite number."""
    try:
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:
        return None


def names(paths: list[Path]) -> Iterator[str]:
    """Yields the shortest names that distinguish the runs: their last directory, or more of the path."""
    # Path.resolve() raises a RuntimeError on a link that leads to itself; as a run it is refused later.
    parts = [Path(os.path.realpath(path)).parts for path in paths]
    for directories in parts:
        length = 1
        while length < len(directories) and sum(other[-length:] == directories[-length:] for other in parts) > 1:
            length += 1
        # The first part of an absolute path is a slash itself.
        yield "/".join(directories[-length:]).replace("//", "/", 1)
