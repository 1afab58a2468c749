"""An engine in virtual time, for a limit of samples in flight: a batch that saturates, and a cache that fills up."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from slime.rollout.fleet.concurrency import ConcurrencyLimit, EngineLoad

POLL_SECONDS = 0.25
PROMPT = 32
Lengths = Callable[[random.Random], int]


@dataclass(eq=False)
class Simulated:
    left: int
    began: int
    tokens: int = PROMPT
    retractions: int = 0


@dataclass
class SimulatedEngine:
    """step_seconds(n): the seconds of a step with n running samples. most_tokens: the most that a response may have."""

    step_seconds: Callable[[int], float]
    lengths: Lengths
    max_running: int = 512
    cache_tokens: int = 1 << 30
    most_tokens: int = 1000
    seed: int = 0
    waiting: deque[Simulated] = field(default_factory=deque)
    running: list[Simulated] = field(default_factory=list)
    retracted: int = 0
    made: int = 0
    seconds: float = 0.0

    def serve(self, limit: ConcurrencyLimit | int, seconds: float) -> float:
        """Returns the tokens per second over that time, with endless demand up to the limit."""
        until, made, begun = self.seconds + seconds, self.made, self.seconds
        poll, rng = self.seconds + POLL_SECONDS, random.Random(self.seed)
        while self.seconds < until:
            value = limit if isinstance(limit, int) else limit.value
            while len(self.waiting) + len(self.running) < value:
                began = limit.began(PROMPT + self.most_tokens) if isinstance(limit, ConcurrencyLimit) else 0
                self.waiting.append(Simulated(self.lengths(rng), began))
            for done in self._step():
                if isinstance(limit, ConcurrencyLimit):
                    limit.answered(1, int(done.retractions > 0), done.began)
            if isinstance(limit, ConcurrencyLimit) and self.seconds >= poll:
                poll = self.seconds + POLL_SECONDS
                load = EngineLoad(
                    len(self.running), len(self.waiting), self._used / self.cache_tokens, self.cache_tokens
                )
                limit.observe(load, len(self.running) + len(self.waiting), True)
        return (self.made - made) / (self.seconds - begun)

    @property
    def _used(self) -> int:
        return sum(sample.tokens for sample in self.running)

    def _step(self) -> list[Simulated]:
        used, again = self._used, 0
        while len(self.running) > 1 and used + len(self.running) > self.cache_tokens:
            shortest = min(self.running, key=lambda sample: sample.tokens)
            self.running.remove(shortest)
            self.waiting.appendleft(shortest)
            shortest.retractions += 1
            self.retracted += 1
            used -= shortest.tokens
        while self.waiting and len(self.running) < self.max_running:
            if self.running and used + self.waiting[0].tokens > 0.98 * self.cache_tokens:
                break
            used += self.waiting[0].tokens
            again += self.waiting[0].tokens
            self.running.append(self.waiting.popleft())
        for sample in self.running:
            sample.left -= 1
            sample.tokens += 1
        self.made += len(self.running)
        self.seconds += self.step_seconds(len(self.running)) + 1e-5 * again
        done = [sample for sample in self.running if sample.left <= 0]
        self.running = [sample for sample in self.running if sample.left > 0]
        return done
