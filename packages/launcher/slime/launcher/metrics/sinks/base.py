"""`Sink`: the interface of receivers of a run's metrics, and a guard that keeps their failures from the run."""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.platform.secret_variables import without_secrets

log = logging.getLogger(__name__)

Metrics = dict[str, float]
CLOSE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run whose metrics a tracker shows.

    config: settings to show beside the metrics; values are JSON, and none is private.
    """

    name: str
    output_dir: Path
    config: Mapping[str, Any]


class Sink(ABC):
    """Gets all metrics of a run, in order: those of each iteration, and those of each evaluation, whose step is the
    number of iterations before it."""

    def start(self, first_step: int, evaluation: Metrics | None) -> None:
        """Begins with `first_step`. An earlier start of the run may have sent this step and later ones already.

        evaluation: the earlier start's metrics of the weights that this start begins with, and may evaluate again.
        """
        return None

    @abstractmethod
    def write(self, step: int, metrics: Metrics) -> None: ...

    def close(self, *, failed: bool) -> None:
        """Sends metrics that are still held back. failed: the run ended with an error."""
        return None


class Guarded(Sink):
    """Calls a sink in a thread of its own. A failure is reported once and does not end the run; the sink then gets no
    more metrics. A slow sink delays only the end of the run, by at most `close_seconds`.
    """

    def __init__(self, flag: str, sink: Sink, *, close_seconds: float = CLOSE_SECONDS) -> None:
        self._flag = flag
        self._sink = sink
        self._close_seconds = close_seconds
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sink {flag}", daemon=True)
        self._thread.start()

    def start(self, first_step: int, evaluation: Metrics | None) -> None:
        self._calls.put(lambda: self._sink.start(first_step, evaluation))

    def write(self, step: int, metrics: Metrics) -> None:
        copy = dict(metrics)
        self._calls.put(lambda: self._sink.write(step, copy))

    def close(self, *, failed: bool) -> None:
        self._calls.put(lambda: self._sink.close(failed=failed))
        self._calls.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            log.warning("%s: not everything was sent within %g s", self._flag, self._close_seconds)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception as error:
                log.warning("%s: %s; the run goes on without it", self._flag, described(error))
                return


def described(error: Exception) -> str:
    """Returns the error of a tracker's package as one line, without secrets."""
    lines = without_secrets(str(error)).split("\n")
    return f"{type(error).__name__}: {lines[0][:500]}" if lines[0] else type(error).__name__
