"""Models in training by their ids, and the order of the requests for each.

The SDK numbers the requests for a model from 1 on and may send them out of order. They run in the order of their
numbers, one at a time, on the one thread that trains.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime.launcher.tinker.adapters import AdapterRequest
from slime.launcher.tinker.training import TrainedModel
from slime.types.errors import Busy, DeadlineExceeded, InvalidField, NotFound, WrongState

T = TypeVar("T")

# Seconds that a request waits for an earlier one that has not come.
GAP_SECONDS = 330.0
MOST_AHEAD = 4096


@dataclass(eq=False)
class _Request:
    """A request for a model. work: runs on the thread; started: resolves to the future of the work once that is on the
    thread. is_wanted: False once the request failed or was cancelled; its work then must not take effect."""

    work: Callable[[], Any]
    started: asyncio.Future[asyncio.Future[Any]]
    is_wanted: bool = True


@dataclass
class TrainingRun:
    """A model of a session. turn: the number of the next request to run; waiting: requests that came before their
    turn, by number."""

    model_id: str
    session: str
    # None where all weights train.
    adapter: AdapterRequest | None = None
    turn: int = 1
    waiting: dict[int, _Request] = field(default_factory=dict)
    # None while the model is loaded, and if that failed.
    trained: TrainedModel | None = None
    snapshots: int = 0


class Models:
    """The models in training. Used on one event loop. closing: set when the service ends, so that long work on the
    thread gives up."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.closing = threading.Event()
        self._models: dict[str, TrainingRun] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def find(self, model_id: str) -> TrainingRun:
        """Returns a model. Raises NotFound."""
        if model_id not in self._models:
            raise NotFound(
                f"there is no model {model_id}: it was never created, or its session has ended", field="model_id",
                value=model_id,
            )  # fmt: skip
        return self._models[model_id]

    def add(self, model: TrainingRun, gone: Callable[[str], bool]) -> None:
        """Adds a model; if there are too many, ends sessions whose clients are gone. Raises WrongState, InvalidField.

        gone: returns whether the client of a session is gone.
        """
        if model.model_id in self._models:
            raise InvalidField("model_seq_id", model.model_id, "a number without a model in this session")
        if len(self._models) >= self.most:
            for session in {each.session for each in self._models.values() if gone(each.session)}:
                self.end(session)
        if len(self._models) >= self.most:
            holders = ", ".join(sorted({each.session for each in self._models.values()}))
            raise WrongState(
                f"--max-models {self.most}: as many models of session {holders} are in training already; end that "
                "session, or start the service with a larger --max-models",
                field="--max-models", value=self.most,
            )  # fmt: skip
        self._models[model.model_id] = model

    def end(self, session: str) -> list[TrainingRun]:
        """Forgets the models of a session; returns them."""
        ended = [model for model in self._models.values() if model.session == session]
        for model in ended:
            del self._models[model.model_id]
        return ended

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def load(self, model: TrainingRun, make: Callable[[], TrainedModel]) -> None:
        """Loads a model on the thread. Raises what `make` raises, and forgets the model then."""
        try:
            model.trained = await self.on_thread(make)
        except BaseException:
            self._models.pop(model.model_id, None)
            raise

    def in_turn(
        self,
        model: TrainingRun,
        number: int,
        work: Callable[[TrainedModel], T],
        missed: Callable[[TrainedModel], None] | None = None,
    ) -> Awaitable[T]:
        """Returns an awaitable that runs `work` in the turn of request `number`. Raises InvalidField, Busy.

        missed: called in that turn if the request is no longer wanted.
        """
        if number < model.turn or number in model.waiting:
            raise InvalidField("seq_id", number, f"at least {model.turn}, each once")
        if len(model.waiting) >= MOST_AHEAD:
            raise Busy(f"{MOST_AHEAD} requests wait for number {model.turn} of {model.model_id}", field="seq_id")

        def run() -> T | None:
            trained = model.trained
            if trained is None:
                raise NotFound(f"model {model.model_id} could not be loaded", field="model_id", value=model.model_id)
            try:
                return work(trained) if request.is_wanted else None
            finally:
                if not request.is_wanted and missed is not None:
                    missed(trained)

        loop = asyncio.get_running_loop()
        request = _Request(run, loop.create_future())
        model.waiting[number] = request
        while model.turn in model.waiting:
            # Given to the thread here, in order: the coroutines that wait for the results may wake in any order.
            coming = model.waiting.pop(model.turn)
            model.turn += 1
            running = asyncio.shield(loop.run_in_executor(self._thread, coming.work))
            if coming.started.done():
                running.cancel()
            else:
                coming.started.set_result(running)
        return self._result(model, number, request)

    async def _result(self, model: TrainingRun, number: int, request: _Request) -> Any:
        try:
            return await (await self._started(model, number, request))
        except (asyncio.CancelledError, DeadlineExceeded):
            request.is_wanted = False
            raise

    async def _started(self, model: TrainingRun, number: int, request: _Request) -> asyncio.Future[Any]:
        try:
            async with asyncio.timeout(GAP_SECONDS):
                return await request.started
        except TimeoutError:
            raise DeadlineExceeded(
                f"request {number} of {model.model_id} waited {GAP_SECONDS:g} s for request {model.turn}, which never "
                "came",
                field="seq_id",
                value=number,
                expected=str(model.turn),
            ) from None

    def close(self) -> None:
        """Waits for the work on the thread, which may write to a directory that is removed next."""
        self.closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
