"""One call of Generate or Evaluate: its progress, its open requests, its cancellation.

A context variable carries it, because the signatures of plug-ins have no parameter for it.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any


class RolloutCall:
    def __init__(
        self,
        rollout_id: int,
        total: int,
        *,
        evaluation: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self.total = total
        self.evaluation = evaluation
        self.done = 0
        self.cancelled = threading.Event()
        # Ids of the requests in flight: aborted once the call has enough groups.
        self.open_requests: set[str] = set()
        self.started = time.monotonic()
        self.reward_seconds = 0.0
        # Sums since the call began, for a call that runs until it is cancelled.
        self.metrics: dict[str, float] = {}
        self._on_progress = on_progress
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._lock = threading.Lock()

    def advance(self, by: int = 1) -> None:
        self.done += by
        on_progress = self._on_progress
        if on_progress is not None:
            on_progress(self.done, self.total)

    def attach(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._detach)
        if self.cancelled.is_set():
            future.cancel()

    def _detach(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def cancel(self) -> None:
        """Cancels what still runs, and tells no more progress."""
        self.cancelled.set()
        # A timer that was cancelled, such as the deadline of a request, may stay in its event loop until its time has
        # come, hours later. Its context has this call, which must not keep the job with all samples alive.
        self._on_progress = None
        with self._lock:
            futures = list(self._futures)
        for future in futures:
            future.cancel()


CALL: ContextVar[RolloutCall | None] = ContextVar("slime_rollout_call", default=None)
