"""Engines that the run has not started: each may join the fleet, or leave it, while the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slime.rollout.engines.base import RemoteEngine
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.member import Member
from slime.types.errors import InvalidField, NotFound, WrongState

# Seconds within which the requests of a leaving engine have to end.
LEAVE_SECONDS = 60.0


class ExternalEngines:
    """Adds engines to a fleet and removes them, on its loop. check: raises a SlimeError for one that the run cannot
    use."""

    def __init__(self, weights: EngineWeights, api_key: str | None, check: Callable[[Member], None]) -> None:
        self.fleet = weights.fleet
        self._weights = weights
        self._api_key = api_key
        self._check = check
        # Names are not used again.
        self._count = len(self.fleet.members)
        self._turn = asyncio.Lock()

    async def add(self, url: str) -> Member:
        """Lets the engine at `url` join, and returns its member.

        Raises InvalidField for an engine of another kind than the others, or one that is in the fleet already;
        EngineError or DeadlineExceeded for one that does not answer; the errors of `EngineWeights.join` and of `check`.
        """
        async with self._turn:
            if self.fleet.error is not None:
                raise self.fleet.error
            if any(member.url == url for member in self.fleet.members):
                raise InvalidField("url", url, "an engine that the run does not have yet")
            member = self.fleet.connect(RemoteEngine(f"external-{self._count}", url, api_key=self._api_key))
            try:
                await member.learn_in_time()
                kinds = {other.kind.name for other in self.fleet.members}
                if member.kind.name not in kinds:
                    raise InvalidField("url", f"{url}, {member.kind.title}", f"an engine like the others: {min(kinds)}")
                stages = {other.stage for other in self.fleet.members}
                if member.stage not in stages:
                    part = member.stage or "prefill and decode"
                    raise InvalidField("url", f"{url}, which does {part}", "an engine like the others")
                self._check(member)
                await self._weights.join(member)
            except BaseException:
                await member.client.close()
                raise
            self._count += 1
            return member

    async def remove(self, url: str) -> None:
        """Lets the engine at `url` leave. Returns once its requests go on elsewhere.

        Raises NotFound for an engine that the fleet does not have, WrongState for the only one that does its part.
        """
        async with self._turn:
            member = next((member for member in self.fleet.members if member.url == url), None)
            if member is None:
                known = ", ".join(other.url for other in self.fleet.members)
                raise NotFound(f"the run has no engine at {url}", field="url", value=url, expected=f"one of {known}")
            if not self.fleet.may_leave(member):
                part = f"that does {member.stage}" if member.stage else "of the run"
                raise WrongState(f"the engine at {url} is the only one {part}", field="url", value=url)
            self.fleet.router.take_out(member, awaited=False)
            await self.fleet.move_away(member, LEAVE_SECONDS)
            await self.fleet.leave(member)
