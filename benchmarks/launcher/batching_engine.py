"""An engine whose speed depends on what it runs: a batch that saturates, a cache that fills up, and retractions.

A step makes one token for each running sequence, and takes

    step_seconds + sequence_seconds * sequences + cache_seconds * tokens in the cache + prefill_seconds * prompt tokens

Sequences beyond `max_running` wait. One is admitted while 2 % of the cache stay free; when the cache is full, the
shortest sequence is retracted: it waits again in front, and its tokens are computed again as a prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from latent_run import TOKEN, LatentEngine

ROOM = 0.02


@dataclass(frozen=True)
class Speed:
    """Seconds of a step by what it computes, and the limits of the engine in sequences and in tokens."""

    step_seconds: float = 0.004
    sequence_seconds: float = 0.0
    cache_seconds: float = 0.0
    prefill_seconds: float = 0.0
    max_running: int = 256
    cache_tokens: int = 1 << 20


@dataclass(eq=False)
class Running:
    """A sequence. prompt: tokens of its prompt. left: tokens that it will still make."""

    prompt: int
    left: int
    made: int = 0
    retractions: int = 0
    done: Any = None

    @property
    def tokens(self) -> int:
        return self.prompt + self.made


@dataclass
class Batching:
    """The sequences of an engine, without a clock. made: tokens so far. retracted: sequences, once for each time."""

    speed: Speed
    waiting: deque[Running] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    made: int = 0
    retracted: int = 0

    @property
    def used(self) -> int:
        return sum(sequence.tokens for sequence in self.running)

    def loads(self) -> dict[str, Any]:
        """Returns SGLang's answer to /v1/loads."""
        load = {
            "dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": len(self.waiting),
            "num_used_tokens": self.used, "max_total_num_tokens": self.speed.cache_tokens,
            "max_running_requests": self.speed.max_running, "token_usage": self.used / self.speed.cache_tokens,
        }  # fmt: skip
        return {"loads": [load]}

    def step(self) -> tuple[float, list[Running]]:
        """Returns the seconds of a step, and the sequences that it finished."""
        speed, used, prefill = self.speed, self.used, 0
        while len(self.running) > 1 and used + len(self.running) > speed.cache_tokens:
            shortest = min(self.running, key=lambda sequence: sequence.tokens)
            self.running.remove(shortest)
            self.waiting.appendleft(shortest)
            shortest.retractions += 1
            self.retracted += 1
            used -= shortest.tokens
        while self.waiting and len(self.running) < speed.max_running:
            tokens = self.waiting[0].tokens
            if self.running and used + tokens > (1 - ROOM) * speed.cache_tokens:
                break
            self.running.append(self.waiting.popleft())
            used, prefill = used + tokens, prefill + tokens
        for sequence in self.running:
            sequence.made += 1
            sequence.left -= 1
        self.made += len(self.running)
        finished = [sequence for sequence in self.running if sequence.left <= 0]
        seconds = (
            speed.step_seconds + speed.sequence_seconds * len(self.running)
            + speed.cache_seconds * used + speed.prefill_seconds * prefill
        )  # fmt: skip
        self.running = [sequence for sequence in self.running if sequence.left > 0]
        return seconds, finished


class BatchingEngine(LatentEngine):
    """Serves SGLang's protocol in a thread. The first token of a prompt is the length of its response."""

    def __init__(self, speed: Speed) -> None:
        self.batch = Batching(speed)
        self._work: asyncio.Event | None = None
        self._finished: list[Running] = []
        super().__init__([], speed.step_seconds)

    async def _start(self) -> None:
        self._work = asyncio.Event()
        self._steps = asyncio.create_task(self._run())
        await super()._start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._steps.cancel)
        self._loop.call_soon_threadsafe(self._end_all)
        super().stop()

    def _end_all(self) -> None:
        for sequence in [*self._finished, *self.batch.running, *self.batch.waiting]:
            if not sequence.done.done():
                sequence.done.set_result(None)
        self.batch.running, self.batch.waiting = [], deque()

    async def _abort(self, request: web.Request) -> web.Response:
        self._end_all()
        return web.json_response({})

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/loads", self._loads)

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response(self.batch.loads())

    async def _run(self) -> None:
        assert self._work is not None
        due = time.monotonic()
        while True:
            if not self.batch.running and not self.batch.waiting:
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
            seconds, self._finished = self.batch.step()
            # Against the clock, so that what a step costs this process is part of its time.
            due += seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            for sequence in self._finished:
                if not sequence.done.done():
                    sequence.done.set_result(None)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        pairs = zip(body["input_ids"], body["sampling_params"], strict=True)
        return web.json_response(await asyncio.gather(*(self._answer(*pair) for pair in pairs)))

    async def _answer(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        assert self._work is not None
        done = asyncio.get_running_loop().create_future()
        sequence = Running(len(prompt), min(prompt[0], params["max_new_tokens"]), done=done)
        self.batch.waiting.append(sequence)
        self._work.set()
        await done
        meta = {
            "finish_reason": {"type": "abort" if sequence.left > 0 else "length"}, "weight_version": str(self.version),
            "prompt_tokens": len(prompt), "completion_tokens": sequence.made, "num_retractions": sequence.retractions,
            "output_token_logprobs": [[-1.0, TOKEN, None]] * sequence.made,
        }  # fmt: skip
        return {"text": "", "output_ids": [TOKEN] * sequence.made, "meta_info": meta}
