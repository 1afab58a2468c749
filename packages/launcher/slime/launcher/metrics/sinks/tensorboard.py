"""Writes metrics as TensorBoard events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from slime.launcher.metrics.files import is_evaluation
from slime.launcher.metrics.sinks.base import Metrics, Sink


class TensorBoard(Sink):
    """Events below `directory`, in a file for each start of the run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._kept: tuple[int, Metrics] | None = None

    def start(self, first_step: int, evaluation: Metrics | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # Readers drop events of this step and later ones that earlier files hold (PyTorch's `purge_step`).
        log = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=first_step, session_log=log))
        if evaluation is not None:
            self._kept = first_step, evaluation

    def write(self, step: int, metrics: Metrics) -> None:
        if self._kept is not None and step >= self._kept[0]:
            if step > self._kept[0] or not is_evaluation(metrics):
                self._write(*self._kept)
            self._kept = None
        self._write(step, metrics)

    def close(self, *, failed: bool) -> None:
        if self._kept is not None:
            self._write(*self._kept)
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, metrics: Metrics) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._directory))
        self._writer.add_event(event)
        self._writer.flush()
