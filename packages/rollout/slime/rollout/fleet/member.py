"""One engine of a fleet: its client, its abilities, and whether it is held."""

from __future__ import annotations

import asyncio

from slime.rollout.engines.base import RunningEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.kind import Abilities
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import engine_kind, kind_of
from slime.types.errors import DeadlineExceeded, EngineError, InvalidField

# SGLang's names for what it can give back; the weights come back empty unless it keeps a copy on the CPU.
MEMORY_PARTS = ("weights", "kv_cache", "cuda_graph")


class Member:
    """One engine of a fleet. weight_version: the last one read from the engine. released: parts of its GPU memory that
    it gave back.

    held: its generation is paused, and it is not asked to prove its health by generating.
    out: its process has died or hangs, and another one is being started. awaits_weights: it was started again, and gets
    no requests before it has been sent the weights that serve.
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
        self.awaits_weights = False
        self.released: set[str] = set()
        self._probe: asyncio.Future[None] | None = None

    @property
    def exited(self) -> bool:
        return isinstance(self.engine, EngineProcess) and self.engine.poll() is not None

    def replace(self, engine: RunningEngine, client: EngineClient) -> None:
        """Replaces a process that has ended by one that has just started."""
        self.engine, self.client, self.url = engine, client, engine.url
        self.held = False
        self.released = set()

    async def learn(self) -> None:
        """Reads the weight version and what the engine can do. Raises EngineError where it is gone."""
        self.weight_version = await self.read_version()
        try:
            info = await self.client.server_info()
        except InvalidField:
            # Routers in front of engines need not know this call.
            info = {}
        self.kind = kind_of(info, self.kind)
        self.abilities = self.kind.abilities(info)

    async def read_version(self) -> int:
        """Returns the weight version that the engine says it holds. Raises EngineError if that is not a number."""
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
                f"engine {self.name} names its weight version {text!r}, expected an integer",
                field=self.name,
                value=text,
            ) from None

    async def probe(self, timeout_seconds: float) -> None:
        """Has it make a token; where it is held, only answer. Raises SlimeError."""
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
        """Pauses it, with nothing left running and no cached prefixes. Harmless when it is held already."""
        if self.held:
            return
        self.held = True
        if self._probe is not None:
            self._probe.cancel()
        await self.kind.hold(self.client)

    async def serve(self) -> None:
        await self.client.continue_()
        self.held = False

    async def release(self, parts: set[str]) -> None:
        """Gives back those of `parts` that it still has. Must be held."""
        wanted = [part for part in MEMORY_PARTS if part in parts - self.released]
        if wanted:
            await self.client.release_memory(wanted)
            self.released |= set(wanted)

    async def resume(self, parts: set[str]) -> None:
        """Takes back those of `parts` that it gave back."""
        wanted = [part for part in MEMORY_PARTS if part in parts & self.released]
        if wanted:
            await self.client.resume_memory(wanted)
            self.released -= set(wanted)
