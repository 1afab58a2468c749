"""Who runs when: one thread owns the model; requests wait, run as a batch, and answer.

What arrives while a batch runs joins the next one. With `deterministic` the sequences of one HTTP request are a batch
of their own, in the order of arrival. Weight updates and pauses take effect between two steps.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.rollout.engines.embedded.decode import Batch, Response
from slime.rollout.engines.embedded.loading import Loaded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.weights import Weights
from slime.types.errors import EngineError

log = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "aborted"}


@dataclass(eq=False)
class Request:
    """The sequences of one HTTP request; `done` is resolved when all of them have finished."""

    responses: list[Response]
    done: Future[None] = field(default_factory=Future)


class _Room:
    """What one batch can hold."""

    def __init__(self, sequences: int, prefill_tokens: int) -> None:
        self.responses: list[Response] = []
        self._sequences = sequences
        self._tokens = prefill_tokens
        self._prompts: set[tuple[int, ...]] = set()
        self._longest = 0

    def take(self, response: Response) -> bool:
        """Adds it if it fits; the first always does."""
        prompt = tuple(response.prompt_ids)
        longest = max(self._longest, len(prompt))
        padded = longest * (len(self._prompts) + (prompt not in self._prompts))
        if self.responses and (len(self.responses) >= self._sequences or padded > self._tokens):
            return False
        self.responses.append(response)
        self._prompts.add(prompt)
        self._longest = longest
        return True


class Scheduler:
    """Runs requests on `loaded`. Every public method may be called from any thread."""

    def __init__(self, loaded: Loaded, options: EmbeddedOptions) -> None:
        self._loaded = loaded
        self._options = options
        self.weights = Weights(loaded.model, options.weight_version)
        self._rng = np.random.default_rng(options.random_seed)
        self._inbox: queue.SimpleQueue[Request | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._batch: Batch | None = None
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return sum(len(request.responses) for request in list(self._waiting))

    @property
    def num_running(self) -> int:
        batch = self._batch
        return len(batch.running) if batch is not None else 0

    def submit(self, responses: list[Response]) -> Request:
        """The caller waits for `request.done`; a failure of the model is raised there."""
        request = Request(responses)
        self._inbox.put(request)
        return request

    def between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Runs `function` on the model's thread when no step is under way."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def abort(self, rid: str | None) -> Future[Any]:
        """Ends sequence `rid`, or all: each answers with what it has, and finish reason "abort"."""
        return self.between_steps(lambda: self._abort(rid))

    def pause(self, mode: str) -> Future[Any]:
        """New requests wait until `resume`. What runs is ended ("abort"), frozen ("in_place") or redone ("retract")."""

        def run() -> None:
            self._paused = True
            if mode == "abort":
                self._abort(None)
            elif mode == "retract":
                self._retract()

        return self.between_steps(run)

    def resume(self) -> Future[Any]:
        def run() -> None:
            self._paused = False

        return self.between_steps(run)

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        try:
            while self._take(block=self._paused or not (self._running or self._waiting)):
                if self._paused:
                    continue
                if self._batch is None and (self._running or self._waiting):
                    if not self._running:
                        self._gather()
                    self._form_batch()
                if self._batch is not None:
                    self._step(self._batch)
            self._fail([*self._running, *self._waiting], EngineError("the engine is stopping"))
        except BaseException:
            # Without this thread the engine is a process that answers nothing.
            log.exception("the scheduler failed")
            os._exit(1)

    def _take(self, *, block: bool) -> bool:
        """Everything in the inbox; with `block` at least one thing. False when the engine stops."""
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            if isinstance(item, Request):
                self._waiting.append(item)
            else:
                item()

    def _gather(self) -> None:
        if self._options.deterministic:
            return
        deadline = time.monotonic() + self._options.gather_ms / 1000
        while (left := deadline - time.monotonic()) > 0:
            try:
                item = self._inbox.get(timeout=left)
            except queue.Empty:
                return
            if item is None:
                self._inbox.put(None)
                return
            if not isinstance(item, Request):
                item()
                return
            self._waiting.append(item)

    def _form_batch(self) -> None:
        """Takes sequences in order of arrival as long as they fit; what is left of a request joins the next batch."""
        chosen = _Room(self._options.max_running_requests, self._options.max_prefill_tokens)
        for request in [*self._running, *self._waiting]:
            unfinished = [r for r in request.responses if r.finish_reason is None]
            fitting = sum(1 for _ in itertools.takewhile(chosen.take, unfinished))
            if request not in self._running and (fitting or not unfinished):
                self._waiting.remove(request)
                self._running.append(request)
            if fitting < len(unfinished) or self._options.deterministic:
                break
        for response in chosen.responses:
            response.weight_version = self.weights.version
        loaded = self._loaded
        self._batch = Batch(loaded.model, loaded.tokenizer, chosen.responses, loaded.eos_ids, self._rng)

    def _step(self, batch: Batch) -> None:
        try:
            self.weights.check_complete()
            if not batch.done:
                batch.step()
        except Exception as error:
            log.exception("a batch of %d sequences failed", len(batch.running))
            failed, self._running, self._batch = self._running, [], None
            self._fail(failed, error)
            return
        self._answer()
        if batch.done:
            self._batch = None

    def _fail(self, requests: list[Request], error: Exception) -> None:
        for request in requests:
            if not request.done.done():
                request.done.set_exception(error)

    def _answer(self) -> None:
        for request in list(self._running):
            if all(r.finish_reason is not None for r in request.responses):
                self._running.remove(request)
                _resolve(request)

    def _abort(self, rid: str | None) -> None:
        for request in [*self._running, *self._waiting]:
            for response in request.responses:
                if response.finish_reason is None and rid in (None, response.rid):
                    response.weight_version = response.weight_version or self.weights.version
                    response.finish(dict(ABORTED))
        for request in [r for r in self._waiting if all(s.finish_reason is not None for s in r.responses)]:
            self._waiting.remove(request)
            _resolve(request)
        self._answer()
        if self._batch is not None and self._batch.done:
            self._batch = None

    def _retract(self) -> None:
        for request in reversed(self._running):
            for response in request.responses:
                if response.finish_reason is None:
                    response.output_ids.clear()
                    response.log_probs.clear()
            self._waiting.appendleft(request)
        self._running, self._batch = [], None


def _resolve(request: Request) -> None:
    # The waiting side may have cancelled it: its client went away.
    if not request.done.done():
        request.done.set_result(None)
