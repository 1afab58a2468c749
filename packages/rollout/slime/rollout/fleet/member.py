"""One engine of a fleet: its client, its abilities, and whether it is held."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.rollout.engines.base import RemoteEngine, RunningEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.kind import Abilities
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import engine_kind, kind_of
from slime.rollout.fleet.concurrency import ConcurrencyLimit
from slime.types.errors import DeadlineExceeded, EngineError, InvalidField

T = TypeVar("T")

# Seconds within which an engine has to answer what it is.
LEARN_SECONDS = 60.0
# SGLang's names for the memory that it can release; weights come back empty unless the engine keeps a copy on the CPU.
MEMORY_PARTS = ("weights", "kv_cache", "cuda_graph")


class Member:
    """One engine of a fleet.

    weight_version: the last version read from the engine. released: the parts of its GPU memory that are released.
    held: its generation is paused, so health probes do not ask it to generate. out: its process has died or hangs, and
    another one is being started, or it has left the fleet (left). awaits_weights: it was restarted or has joined, and
    gets no requests before it has received the weights that the other engines serve. limit: the
    tuned limit of samples in flight; None where the limit is fixed.
    """

    def __init__(self, engine: RunningEngine, client: EngineClient) -> None:
        self.engine = engine
        self.client = client
        self.name = engine.name
        self.kind = engine_kind(engine.kind)
        self.url = engine.url
        self.healthy = True
        self.weight_version = 0
        self.abilities = Abilities()
        self.held = False
        self.out = False
        self.left = False
        self.awaits_weights = False
        self.released: set[str] = set()
        self.limit: ConcurrencyLimit | None = None
        self._probe: asyncio.Future[None] | None = None
        self._generating: set[asyncio.Future[Any]] = set()

    @property
    def stage(self) -> str:
        """PREFILL or DECODE for an engine of pairs, "" for one that does both."""
        return self.abilities.stage

    @property
    def external(self) -> bool:
        """True for an engine from outside the run."""
        return type(self.engine) is RemoteEngine

    @property
    def delta_carriers(self) -> tuple[str, ...]:
        """The ways in which it receives weight deltas."""
        return () if self.external and self.kind.deltas_if_started else self.kind.delta_carriers

    @property
    def exited(self) -> bool:
        return isinstance(self.engine, EngineProcess) and self.engine.poll() is not None

    def replace(self, engine: RunningEngine, client: EngineClient) -> None:
        """Replaces a process that has ended with its successor, which has just started."""
        self.engine, self.client, self.url = engine, client, engine.url
        self.held = False
        self.released = set()
        if self.limit is not None:
            self.limit.interrupted()

    async def until_left(self, generating: Coroutine[Any, Any, T]) -> T:
        """Awaits a request. Raises EngineError as soon as the engine has left the fleet: one that hangs, and that the
        run cannot end, would keep its connections open."""
        if not self.external:
            return await generating
        task = asyncio.ensure_future(generating)
        self._generating.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not self.left or (current is not None and current.cancelling()):
                raise
            raise EngineError(f"engine {self.name} at {self.url} is gone: it left the run", field=self.name) from None
        finally:
            self._generating.discard(task)

    async def leave(self) -> None:
        """Ends the requests of an engine that leaves the fleet, and closes its client."""
        self.out = self.left = True
        self.healthy = self.awaits_weights = False
        for task in list(self._generating):
            task.cancel()
        await self.client.close()

    async def learn(self) -> None:
        """Reads the engine's weight version and its abilities. Raises EngineError where the engine is gone."""
        self.weight_version = await self.read_version()
        try:
            info = await self.client.server_info()
        except InvalidField:
            # A router in front of engines may not offer this call.
            info = {}
        self.kind = kind_of(info, self.kind)
        self.abilities = self.kind.abilities(info)

    async def learn_in_time(self) -> None:
        """Does what `learn` does. Raises DeadlineExceeded where the engine does not answer within LEARN_SECONDS."""
        try:
            await asyncio.wait_for(self.learn(), LEARN_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no answer of the engine at {self.url} in {LEARN_SECONDS:g} s", field="url", value=self.url
            ) from None

    async def read_version(self) -> int:
        """Returns the weight version that the engine reports. Raises EngineError if it is not a number."""
        try:
            text = await self.client.weight_version()
        except DeadlineExceeded as error:
            raise EngineError(error.message, field=self.name) from error
        # SGLang calls the weights that it started from "default".
        if text == "default":
            return 0
        try:
            return int(text)
        except ValueError:
            raise EngineError(
                f"engine {self.name} reports weight version {text!r}, expected an integer",
                field=self.name,
                value=text,
            ) from None

    async def probe(self, timeout_seconds: float) -> None:
        """Asks the engine to generate a token, or only to answer where it is held. Raises SlimeError if it fails."""
        if self.held:
            await self.client.model_info(timeout_seconds)
            return
        self._probe = asyncio.ensure_future(self.client.health_generate(timeout_seconds))
        try:
            await asyncio.wait({self._probe})
            # A probe that was cancelled because the engine is held says nothing about its health.
            if not self._probe.cancelled():
                self._probe.result()
        finally:
            self._probe.cancel()
            self._probe = None

    async def hold(self) -> None:
        """Pauses the engine, ends its running requests and drops its cached prefixes. Does nothing if already held."""
        if self.held:
            return
        self.held = True
        if self.limit is not None:
            # A pause retracts all requests, which says nothing about the limit.
            self.limit.interrupted()
        if self._probe is not None:
            self._probe.cancel()
        await self.kind.hold(self.client)

    async def serve(self) -> None:
        await self.client.continue_()
        self.held = False

    async def release(self, parts: set[str]) -> None:
        """Releases those of `parts` that the engine still has. The engine must be held."""
        allocated = [part for part in MEMORY_PARTS if part in parts - self.released]
        if allocated:
            await self.client.release_memory(allocated)
            self.released |= set(allocated)

    async def resume(self, parts: set[str]) -> None:
        """Allocates those of `parts` again that were released."""
        missing = [part for part in MEMORY_PARTS if part in parts & self.released]
        if missing:
            await self.client.resume_memory(missing)
            self.released -= set(missing)
