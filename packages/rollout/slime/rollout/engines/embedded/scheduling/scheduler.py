"""Schedules requests: one thread owns the model; requests wait, run in batches, and are answered.

Sequences that arrive while a batch runs join it, or the next one if they do not fit. With `deterministic` the sequences
of each HTTP request form a batch of their own, in the order of arrival. Weight updates and pauses take effect between
two steps, where also one piece of a prompt to score is computed.

A sequence that fails is answered with its error, and the others go on. If a step fails as a whole, the batch is halved
until the sequence that makes it fail runs alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from slime.rollout.engines.embedded.dense.model import DenseModel
from slime.rollout.engines.embedded.model.continuous import ContinuousBatch
from slime.rollout.engines.embedded.model.decode import Batch
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.padded import PaddedBatch
from slime.rollout.engines.embedded.model.response import Response
from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.scheduling.requests import Call, Pieces, SubmittedRequest
from slime.types.errors import EngineError, counted

log = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "aborted"}
STOPPING = "the engine is stopping"


class _Room:
    """Sequences to add to a batch, up to its limits.

    sequences: the most of them. prefill_tokens: the most tokens of their distinct prompts, padding included.
    cache_tokens: the most planned tokens of all. is_new: whether the batch is empty so far. padded: whether each
    sequence takes as many planned tokens as the longest.
    """

    def __init__(
        self, sequences: int, prefill_tokens: int, cache_tokens: int, *, is_new: bool, padded: bool = False
    ) -> None:
        self.responses: list[Response] = []
        self._sequences = sequences
        self._cache_tokens = cache_tokens
        self._is_new = is_new
        self._padded = padded
        self._tokens = prefill_tokens
        self._prompts: set[tuple[str, tuple[int, ...]]] = set()
        self._longest = 0
        self._planned: list[int] = []

    def take(self, response: Response) -> bool:
        """Adds a response if it fits, and returns whether it did. The first prompt always fits the limit on prefill,
        and the first sequence of a new batch the limit on memory."""
        planned = [*self._planned, response.planned_tokens]
        total = max(planned) * len(planned) if self._padded else sum(planned)
        if total > self._cache_tokens and (self.responses or not self._is_new):
            return False
        prompt = response.key
        longest = max(self._longest, len(prompt[1]))
        padded = longest * (len(self._prompts) + (prompt not in self._prompts))
        if self.responses and (len(self.responses) >= self._sequences or padded > self._tokens):
            return False
        self.responses.append(response)
        self._prompts.add(prompt)
        self._longest = longest
        self._planned = planned
        return True


class Scheduler:
    """Runs requests on a loaded model. Thread-safe."""

    def __init__(self, loaded: Loaded, options: EmbeddedOptions) -> None:
        self._loaded = loaded
        self._options = options
        self.weights = ModelWeights(loaded.model, options.weight_version, loaded.vision)
        self._rng = np.random.default_rng(options.random_seed)
        self._inbox: queue.SimpleQueue[SubmittedRequest | Call | Pieces | None] = queue.SimpleQueue()
        # Unanswered requests, in the order of arrival.
        self._requests: list[SubmittedRequest] = []
        self._dense = DenseModel(loaded.model) if DenseModel.supports(loaded.model) else None
        self._batch: Batch | None = None
        self.max_tokens = self._new_batch().max_tokens
        # Halves of batches that failed, each to be run as a batch of its own.
        self._apart: list[list[Response]] = []
        self._pieces: deque[Pieces] = deque()
        self._paused = False
        self._warned_of_memory = False
        self._stopped = False
        self._door = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        return sum(len(request.waiting) for request in list(self._requests))

    @property
    def num_running(self) -> int:
        batch = self._batch
        return len(batch.running) if batch is not None else 0

    @property
    def used_tokens(self) -> int:
        """The number of tokens whose keys and values are in memory, of at most `max_tokens`."""
        batch = self._batch
        return 0 if batch is None else batch.used_tokens

    def submit(self, responses: list[Response]) -> SubmittedRequest:
        """Queues a request. Its `done` raises a failed sequence's error, or EngineError if the engine stops."""
        request = SubmittedRequest(responses)
        self._put(request)
        return request

    def withdraw(self, request: SubmittedRequest) -> None:
        """Ends the unfinished sequences of a request that nobody waits for. Does nothing once the engine stops."""
        with contextlib.suppress(EngineError):
            self.between_steps(lambda: self._end(lambda r: r in request.responses))

    def between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Runs `function` on the model's thread when no step is under way. Raises EngineError once the engine stops."""
        call = Call(function)
        self._put(call)
        return call.done

    def in_pieces(self, begin: Callable[[], Iterator[Any]]) -> Pieces:
        """Computes one item of `begin()` between every two steps; several such tasks run one after the other."""
        pieces = Pieces(begin)
        self._put(pieces)
        return pieces

    def abort(self, rid: str | None) -> Future[Any]:
        """Ends sequence `rid`, or all if None. Each is answered with its tokens so far and finish reason "abort"."""
        return self.between_steps(lambda: self._end(lambda r: rid in (None, r.rid)))

    def pause(self, mode: str) -> Future[Any]:
        """Makes new requests wait; ends ("abort"), freezes ("in_place") or later restarts ("retract") running ones."""

        def run() -> None:
            self._paused = True
            if mode == "abort":
                self._end(lambda r: True)
            elif mode == "retract":
                self._retract()

        return self.between_steps(run)

    def resume(self) -> Future[Any]:
        def run() -> None:
            self._paused = False

        return self.between_steps(run)

    def stop(self) -> None:
        """Waits for the current step; requests that are unfinished by then are answered with EngineError."""
        with self._door:
            self._stopped = True
            self._inbox.put(None)
        self._thread.join(timeout=30)

    def _put(self, item: SubmittedRequest | Call | Pieces) -> None:
        # The lock keeps items from entering the inbox after the end mark, where nobody would answer them.
        with self._door:
            if self._stopped:
                raise EngineError(STOPPING)
            self._inbox.put(item)

    def _run(self) -> None:
        try:
            while self._take(block=(self._paused or not self._requests) and not self._pieces):
                if self._pieces and self._pieces[0].advance(self.weights.writes):
                    self._pieces.popleft()
                if self._paused:
                    continue
                if self._batch is None and self._requests and not self._gather():
                    continue
                self._fill_batch()
                if self._batch is not None:
                    self._step(self._batch)
            for unanswered in [*(r.done for r in self._requests), *(p.done for p in self._pieces)]:
                unanswered.set_exception(EngineError(STOPPING))
        except BaseException:
            # Without this thread the engine could not answer any request.
            log.exception("the scheduler failed")
            os._exit(1)

    def _take(self, *, block: bool) -> bool:
        """Accepts all items of the inbox; with `block` waits for at least one. Returns False when the engine stops."""
        while True:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if item is None:
                return False
            self._accept(item)

    def _gather(self) -> bool:
        """Waits briefly for more requests. Returns False if another item arrived, such as a pause or the end mark."""
        if self._options.deterministic or any(request.is_started for request in self._requests):
            return True
        deadline = time.monotonic() + self._options.gather_ms / 1000
        while (left := deadline - time.monotonic()) > 0:
            try:
                item = self._inbox.get(timeout=left)
            except queue.Empty:
                return True
            if item is None:
                self._inbox.put(None)
                return False
            self._accept(item)
            if not isinstance(item, SubmittedRequest):
                return False
        return True

    def _accept(self, item: SubmittedRequest | Call | Pieces) -> None:
        if isinstance(item, SubmittedRequest):
            self._requests.append(item)
        elif isinstance(item, Pieces):
            self._pieces.append(item)
        else:
            item.run()

    def _fill_batch(self) -> None:
        """Adds sequences to the batch in order of arrival, as long as they fit."""
        batch = self._batch
        self._apart = [left for part in self._apart if (left := [r for r in part if r.finish_reason is None])]
        if not self._requests or (batch is not None and (self._options.deterministic or not batch.joinable)):
            return
        if batch is None and self._apart:
            batch = self._batch = self._new_batch()
            batch.add(self._apart.pop(0))
            return
        free = self._options.max_running_requests - self.num_running
        if not free:
            return
        is_new = batch is None
        batch = batch or self._new_batch()
        padded = not batch.joinable
        room = _Room(free, self._options.max_prefill_tokens, batch.free_tokens, is_new=is_new, padded=padded)
        for request in self._requests:
            while request.waiting and room.take(request.waiting[0]):
                request.waiting.popleft()
            if request.waiting or (room.responses and self._options.deterministic):
                break
        if not room.responses:
            return
        for response in room.responses:
            response.weight_version = (response.output_ids and response.weight_version) or self.weights.version
        self._batch = batch
        batch.add(room.responses)

    def _new_batch(self) -> Batch:
        limits = self._options.max_total_tokens, self._options.memory_fraction
        if self._dense is not None:
            return ContinuousBatch(self._loaded, self._dense, self._rng, *limits)
        return PaddedBatch(self._loaded, self._rng, *limits)

    def _step(self, batch: Batch) -> None:
        # Read before the step: one that fails half-way may have lost the sequences that were about to join.
        running = batch.running
        try:
            self.weights.check_complete()
            if self._dense is not None:
                self._dense.pack(self.weights.writes)
        except Exception as error:
            # Without complete weights no sequence can run.
            for response in running:
                response.fail(error)
        else:
            failure: Exception | None = None
            try:
                batch.step()
            except Exception as error:
                failure = error
            taken_back = batch.take_back()
            if failure is not None:
                # A sequence that left the batch must not be in its halves too, or it would run twice.
                self._divide([response for response in running if response not in taken_back], failure)
            self._wait_again(taken_back)
        self._answer()

    def _divide(self, running: list[Response], error: Exception) -> None:
        left = [response for response in running if response.finish_reason is None]
        log.error("a step of %s failed", counted(len(left), "sequence"), exc_info=error)
        self._batch = None
        if len(left) == 1:
            left[0].fail(error)
        elif left:
            half = len(left) // 2
            self._apart[:0] = [left[:half], left[half:]]

    def _wait_again(self, responses: list[Response]) -> None:
        if responses and not self._warned_of_memory:
            self._warned_of_memory = True
            log.warning("memory for keys and values is full: sequences wait, and are computed again from their tokens")
        for response in responses:
            response.retractions += 1
        for request in self._requests if responses else ():
            request.waiting.extendleft(r for r in responses if r in request.responses)

    def _answer(self) -> None:
        """Resolves the requests that have finished or failed, and drops the batch if it is done."""
        for request in [r for r in self._requests if r.is_finished or r.error is not None]:
            self._requests.remove(request)
            if request.error is not None:
                for response in request.responses:
                    if response.finish_reason is None:
                        response.finish(dict(ABORTED))
                request.done.set_exception(request.error)
            else:
                request.done.set_result(None)
        if self._batch is not None and self._batch.done:
            self._batch = None

    def _end(self, chosen: Callable[[Response], bool]) -> None:
        for request in self._requests:
            for response in request.responses:
                if response.finish_reason is None and chosen(response):
                    response.weight_version = response.weight_version or self.weights.version
                    response.finish(dict(ABORTED))
            request.drop_finished()
        self._answer()

    def _retract(self) -> None:
        """Makes all unfinished sequences wait again, and drops the tokens of those that are not streamed; streamed ones
        continue from the tokens that clients have already."""
        for request in self._requests:
            for response in request.responses:
                if response.finish_reason is None and response.on_token is None:
                    response.start_over()
            request.waiting = deque(r for r in request.responses if r.finish_reason is None)
        self._batch, self._apart = None, []
