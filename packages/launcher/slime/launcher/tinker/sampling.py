"""Samples from one engine with the weights that each request names; requests for the same weights run together.

The engine has one set of weights. A request for other weights waits until the running requests are done; then the
engine loads these weights, and all requests that wait for them run. Weights take turns in the order of requests, so no
request waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.tinker.requests import Sampling
from slime.launcher.tinker.results import encode_samples
from slime.rollout.engines.client import EngineClient


@dataclass(frozen=True)
class SamplerWeights:
    """A Hugging Face directory. version: differs if the content does."""

    directory: Path
    version: str


class Sampler:
    """Samples from one engine. Used on one event loop. base: the weights that the engine was started with."""

    def __init__(self, engine: EngineClient, base: SamplerWeights) -> None:
        self._engine = engine
        self._loaded: SamplerWeights | None = base
        self._running = 0
        self._waiting: deque[tuple[SamplerWeights, asyncio.Future[None]]] = deque()
        self._switching: asyncio.Task[None] | None = None

    async def sample(self, weights: SamplerWeights, wanted: Sampling) -> bytes:
        """Returns an encoded SampleResponse. Raises EngineError, and what `EngineClient` raises."""
        async with self._using(weights):
            prompt = await self._score(wanted.prompt) if wanted.prompt_logprobs else None
            prompts = [wanted.prompt] * wanted.num_samples
            params = [dict(wanted.params) for _ in prompts]
            if wanted.seed is not None:
                for number, each in enumerate(params):
                    each["sampling_seed"] = (wanted.seed + number) % 2**63
            answers = await self._engine.generate(prompts, params)
        return encode_samples(answers, prompt)

    async def _score(self, prompt: list[int]) -> list[float | None]:
        params = {"max_new_tokens": 0}
        answer: Any = await self._engine.generate(prompt, params, logprob_start_len=0)
        return [value for value, _, _ in answer["meta_info"]["input_token_logprobs"]]

    @asynccontextmanager
    async def _using(self, weights: SamplerWeights) -> AsyncIterator[None]:
        if self._loaded != weights or self._waiting or self._switching is not None:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((weights, turn))
            self._next()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave()
                raise
        else:
            self._running += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._running -= 1
        self._next()

    def _next(self) -> None:
        """Starts the requests for the loaded weights, or begins to load the weights of the first request."""
        while self._waiting and self._waiting[0][1].done():
            self._waiting.popleft()
        if self._switching is not None or not self._waiting:
            return
        wanted = self._waiting[0][0]
        if self._loaded != wanted:
            if not self._running:
                self._switching = asyncio.create_task(self._load(wanted))
            return
        others = deque(entry for entry in self._waiting if entry[0] != wanted)
        admitted = [turn for weights, turn in self._waiting if weights == wanted and not turn.done()]
        self._waiting = others
        for turn in admitted:
            self._running += 1
            turn.set_result(None)

    async def _load(self, weights: SamplerWeights) -> None:
        # After a failure the weights of the engine are unknown.
        self._loaded = None
        try:
            await self._engine.update_weights_from_disk(str(weights.directory), weights.version)
            self._loaded = weights
        except Exception as error:
            for wanted, turn in self._waiting:
                if wanted == weights and not turn.done():
                    turn.set_exception(error)
        finally:
            self._switching = None
            self._next()
