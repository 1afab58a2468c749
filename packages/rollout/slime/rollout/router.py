"""Chooses the engine of a request: the one with the fewest samples in flight, or the one that has the session's cache.

Also the gate of weight updates: while it is shut, no request is admitted. Used on one asyncio loop only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from slime.types.errors import DeadlineExceeded, SlimeError, WrongState


class Routable(Protocol):
    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=Routable)

SESSIONS_KEPT = 65536


class Router(Generic[E]):
    """concurrency: samples in flight an engine. A request of more than that waits until its engine is idle."""

    def __init__(self, engines: Sequence[E], concurrency: int) -> None:
        self.engines = list(engines)
        self.concurrency = concurrency
        self._in_flight = {engine.name: 0 for engine in self.engines}
        self._sessions: OrderedDict[str, E] = OrderedDict()
        self._shut: str | None = None
        self._refusing = False
        self._error: SlimeError | None = None
        self._changed = asyncio.Condition()

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    @asynccontextmanager
    async def admit(self, samples: int = 1, session_id: str | None = None, engine: E | None = None) -> AsyncIterator[E]:
        """An engine for a request of so many samples, held until the block ends.

        Raises the error given to `fail` as soon as it is known.
        """
        chosen = await self._wait_for_place(samples, session_id, engine)
        try:
            yield chosen
        finally:
            self._in_flight[chosen.name] -= samples
            async with self._changed:
                self._changed.notify_all()

    async def _wait_for_place(self, samples: int, session_id: str | None, engine: E | None) -> E:
        async with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._shut is not None and self._refusing:
                    raise WrongState(
                        f"the engines do not serve: {self._shut}",
                        field="weight_version",
                        expected="a committed weight update",
                    )
                if self._shut is None:
                    chosen = engine or self.choose(session_id)
                    load = self._in_flight[chosen.name]
                    if load == 0 or load + samples <= self.concurrency:
                        self._in_flight[chosen.name] += samples
                        return chosen
                await self._changed.wait()

    def choose(self, session_id: str | None = None) -> E:
        if session_id is not None and session_id in self._sessions:
            self._sessions.move_to_end(session_id)
            return self._sessions[session_id]
        chosen = min(self.engines, key=lambda engine: self._in_flight[engine.name])
        if session_id is not None:
            self._sessions[session_id] = chosen
            if len(self._sessions) > SESSIONS_KEPT:
                self._sessions.popitem(last=False)
        return chosen

    async def shut(self, reason: str, *, refuse: bool = False) -> None:
        """Admits nothing more: requests wait, or raise WrongState where `refuse`."""
        async with self._changed:
            self._shut, self._refusing = reason, refuse
            self._changed.notify_all()

    async def open(self) -> None:
        async with self._changed:
            self._shut, self._refusing = None, False
            self._changed.notify_all()

    async def drain(self, timeout: float) -> None:
        """Returns when nothing is in flight. Raises DeadlineExceeded naming how much still is."""

        async def idle() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: self.in_flight == 0 or self._error is not None)

        try:
            await asyncio.wait_for(idle(), timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.in_flight} samples are still being generated after {timeout:g} s",
                field="in_flight",
                value=self.in_flight,
                expected="0",
            ) from None
        if self._error is not None:
            raise self._error

    async def fail(self, error: SlimeError) -> None:
        """Every request that waits, and every later one, raises `error`."""
        async with self._changed:
            self._error = error
            self._changed.notify_all()
