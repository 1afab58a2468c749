"""Chooses the engine of a request: the one with the fewest samples in flight for its limit, or the one that has the
session's cache. Where some engines do prefill and others decode, a request has one of each: it is admitted at one that
decodes, while one that does prefill is in rotation, and then takes that as its helper.

Weight updates shut the router, so that no request is admitted meanwhile. Waiting requests are admitted in the order of
their arrival. Not thread-safe: used on one asyncio loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from slime.rollout.engines.kind import DECODE, PREFILL
from slime.types.errors import DeadlineExceeded, SlimeError, WrongState, counted


class Routable(Protocol):
    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=Routable)

SESSIONS_KEPT = 65536


class Withdrawn(Exception):
    """A request was taken back before it reached an engine."""


@dataclass(eq=False)
class _Waiter(Generic[E]):
    samples: int
    session_id: str | None
    engine: E | None
    keys: frozenset[str]
    place: asyncio.Future[E]


class Router(Generic[E]):
    """Admits requests to engines.

    concurrency: samples in flight at an engine, as one number for all or as a function of the engine; call `refill`
    when its value grows. A larger request waits until its engine is idle. stage_of: PREFILL or DECODE for an engine of
    pairs, "" for others; asked once `in_pairs` is set.
    """

    def __init__(
        self,
        engines: Sequence[E],
        concurrency: int | Callable[[E], int],
        stage_of: Callable[[E], str] = lambda engine: "",
    ) -> None:
        self.engines = list(engines)
        self.stage_of = stage_of
        self.in_pairs = False
        self.limit_of = concurrency if callable(concurrency) else _constant(concurrency)
        self._in_flight = {engine.name: 0 for engine in self.engines}
        # Samples whose prefill is under way at a helper; they are in flight at the engine that decodes.
        self._helping: Counter[str] = Counter()
        # The engines of each session, by the part of a request that they do.
        self._sessions: OrderedDict[tuple[str, str], E] = OrderedDict()
        # Names of the engines that get no requests; True where requests that ask for this engine wait for its return.
        self._out: dict[str, bool] = {}
        self._shut: str | None = None
        self._refusing = False
        self._error: SlimeError | None = None
        self._waiters: list[_Waiter[E]] = []
        # Names of the engines whose limit made a request wait, until `take_held_back` asks.
        self._held_back: set[str] = set()
        self._idle: list[asyncio.Future[None]] = []

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    @property
    def is_shut(self) -> bool:
        return self._shut is not None

    @property
    def in_rotation(self) -> list[E]:
        return [engine for engine in self.engines if engine.name not in self._out]

    @property
    def _helpers(self) -> list[E]:
        """The engines in rotation that do prefill for others."""
        return [engine for engine in self.in_rotation if self.stage_of(engine) == PREFILL]

    def _candidates(self) -> list[E]:
        """Returns the engines that a request may go to now: those that decode only while they have helpers."""
        if not self.in_pairs:
            return self.in_rotation
        excluded = (PREFILL,) if self._helpers else (PREFILL, DECODE)
        return [engine for engine in self.in_rotation if self.stage_of(engine) not in excluded]

    @property
    def can_admit(self) -> bool:
        """True while a request that may go to any engine has one in rotation, and a helper where it needs one."""
        return bool(self._candidates())

    @property
    def has_helper(self) -> bool:
        return bool(self._helpers)

    def take_helper(self, samples: int, session_id: str | None = None) -> E:
        """Returns the engine that does prefill for a request, whose samples are part of its load until `give_back`.
        Call it while there is one: the last may be lost after the request was admitted."""
        chosen = self._least_loaded(self._helpers, PREFILL, session_id)
        self._helping[chosen.name] += samples
        return chosen

    def give_back(self, engine: E, samples: int) -> None:
        self._helping[engine.name] -= samples

    def load_of(self, engine: E) -> int:
        """Returns the number of samples that this engine has to do a part of."""
        return self._in_flight[engine.name] + self._helping[engine.name]

    def take_held_back(self, engine: E) -> bool:
        """Returns whether a request has waited for this engine's limit since the last call."""
        held_back = engine.name in self._held_back
        self._held_back.discard(engine.name)
        return held_back

    def refill(self) -> None:
        """Admits the requests that grown limits have room for. What exceeds a smaller limit drains by itself."""
        self._place_waiters()

    def take_out(self, engine: E, *, awaited: bool) -> None:
        """Sends no more requests to this engine. Where `awaited`, requests that ask for it wait until it is put back;
        all other requests, and the sessions that it served, go to other engines."""
        self._out[engine.name] = awaited
        self._place_waiters()

    def add(self, engine: E) -> None:
        """Adds an engine, out of rotation until it is put back."""
        self.engines.append(engine)
        self._in_flight[engine.name] = 0
        self._out[engine.name] = False

    def remove(self, engine: E) -> None:
        """Removes an engine, whose name is not used again; the samples in flight there still count."""
        self.engines.remove(engine)
        self.take_out(engine, awaited=False)

    def put_back(self, engine: E) -> None:
        self._out.pop(engine.name, None)
        self._place_waiters()

    @asynccontextmanager
    async def admit(
        self,
        samples: int = 1,
        session_id: str | None = None,
        engine: E | None = None,
        keys: Collection[str] = (),
    ) -> AsyncIterator[E]:
        """Yields the engine of a request of `samples` samples, which count as in flight there until the block ends.

        keys: ids by which `withdraw` finds the request. Raises the error given to `fail`, Withdrawn after `withdraw`,
        and WrongState while the router is shut with `refuse`.
        """
        chosen = await self._wait_for_place(samples, session_id, engine, keys)
        try:
            yield chosen
        finally:
            self._release(chosen, samples)

    async def _wait_for_place(self, samples: int, session_id: str | None, engine: E | None, keys: Collection[str]) -> E:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        place: asyncio.Future[E] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(samples, session_id, engine, frozenset(keys), place)
        self._waiters.append(waiter)
        self._place_waiters()
        try:
            return await place
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            elif place.done() and not place.cancelled() and place.exception() is None:
                # The slot was granted while this task was being cancelled.
                self._release(place.result(), samples)
            raise

    def _release(self, engine: E, samples: int) -> None:
        self._in_flight[engine.name] -= samples
        self._place_waiters()
        if not self.in_flight:
            self._tell_idle()

    def _place_waiters(self) -> None:
        """Admits waiting requests in order, up to the first one that may go to any engine and finds no free one."""
        if self._shut is not None:
            return
        left: list[_Waiter[E]] = []
        for position, waiter in enumerate(self._waiters):
            if waiter.place.done():  # cancelled
                continue
            chosen = self._asked_for(waiter)
            if chosen is None:
                left.append(waiter)
                continue
            load = self._in_flight[chosen.name]
            if load and load + waiter.samples > self.limit_of(chosen):
                self._held_back.add(chosen.name)
                left.append(waiter)
                if waiter.engine is None and waiter.session_id is None:
                    left += self._waiters[position + 1 :]
                    break
                continue
            self._in_flight[chosen.name] += waiter.samples
            waiter.place.set_result(chosen)
        self._waiters = left

    def _asked_for(self, waiter: _Waiter[E]) -> E | None:
        """Returns the engine that the request may go to now; None where it has to wait for one that is out."""
        if waiter.engine is not None and waiter.engine.name not in self._out:
            alone = self.in_pairs and self.stage_of(waiter.engine) == DECODE and not self._helpers
            return None if alone else waiter.engine
        if waiter.engine is not None and self._out[waiter.engine.name]:
            return None
        return self.choose(waiter.session_id) if self._candidates() else None

    def choose(self, session_id: str | None = None) -> E:
        return self._least_loaded(self._candidates(), DECODE, session_id)

    def _least_loaded(self, engines: Sequence[E], stage: str, session_id: str | None) -> E:
        """Returns the engine that does this part of a session's requests, or the one with the lowest load."""
        key = None if session_id is None else (stage, session_id)
        bound = None if key is None else self._sessions.get(key)
        if key is not None and bound is not None and bound in engines:
            self._sessions.move_to_end(key)
            return bound
        chosen = min(engines, key=lambda engine: self.load_of(engine) / self.limit_of(engine))
        if key is not None:
            self._sessions[key] = chosen
            if len(self._sessions) > SESSIONS_KEPT:
                self._sessions.popitem(last=False)
        return chosen

    def withdraw(self, keys: Collection[str] | None = None) -> None:
        """Makes waiting requests raise Withdrawn: all of them, or those whose keys are all among `keys`."""
        wanted = None if keys is None else frozenset(keys)
        gone = [w for w in self._waiters if wanted is None or (w.keys and w.keys <= wanted)]
        self._dismiss(gone, Withdrawn())

    async def shut(self, reason: str, *, refuse: bool = False) -> None:
        """Admits no more requests: they wait, or raise WrongState where `refuse`."""
        self._shut, self._refusing = reason, refuse
        refusal = self._refusal()
        if refusal is not None:
            self._dismiss(list(self._waiters), refusal)

    async def open(self) -> None:
        self._shut, self._refusing = None, False
        self._place_waiters()

    async def drain(self, timeout: float) -> None:
        """Returns when nothing is in flight. Raises DeadlineExceeded with the number of samples that still are."""
        if self.in_flight and self._error is None:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            try:
                await asyncio.wait_for(idle, timeout)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{counted(self.in_flight, 'sample is', 'samples are')} still being generated after {timeout:g} s",
                    field="in_flight",
                    value=self.in_flight,
                    expected="0",
                ) from None
        if self._error is not None:
            raise self._error

    async def fail(self, error: SlimeError) -> None:
        """Makes every request that waits, and every later one, raise `error`."""
        self._error = error
        self._dismiss(list(self._waiters), error)
        self._tell_idle()

    def _refusal(self) -> SlimeError | None:
        if self._error is not None:
            return self._error
        if self._shut is not None and self._refusing:
            return WrongState(
                f"the engines do not serve: {self._shut}",
                field="weight_version",
                expected="a committed weight update",
            )
        return None

    def _dismiss(self, waiters: Collection[_Waiter[E]], error: Exception) -> None:
        gone = set(waiters)
        self._waiters = [waiter for waiter in self._waiters if waiter not in gone]
        for waiter in waiters:
            if not waiter.place.done():
                waiter.place.set_exception(error)

    def _tell_idle(self) -> None:
        waiting, self._idle = self._idle, []
        for idle in waiting:
            if not idle.done():
                idle.set_result(None)


def _constant(concurrency: int) -> Callable[[object], int]:
    return lambda engine: concurrency
