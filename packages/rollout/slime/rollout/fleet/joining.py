"""The members of a fleet, which engines from outside the run join and leave while it goes on."""

from __future__ import annotations

import abc
from collections.abc import Callable

from slime.rollout.engines.base import RunningEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.keys import remember
from slime.rollout.engines.kind import PREFILL
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.router import Router


class ChangingMembers(abc.ABC):
    """The members of a fleet, in rotation or out of it."""

    members: list[Member]
    router: Router[Member]
    _on_new_address: list[Callable[[], None]]

    @abc.abstractmethod
    def _client(self, engine: RunningEngine) -> EngineClient: ...

    @abc.abstractmethod
    def _watch(self, member: Member) -> None:
        """Begins to watch a member."""

    @property
    def alive(self) -> list[Member]:
        """The members whose process runs, in rotation or not."""
        return [member for member in self.members if not member.out]

    @property
    def answering(self) -> list[Member]:
        """The members that answer requests: all but those that do prefill for others."""
        return [member for member in self.members if member.stage != PREFILL]

    def connect(self, engine: RunningEngine) -> Member:
        """Returns the member that an engine would become; `join` makes it one, else its client has to be closed."""
        return Member(engine, self._client(engine))

    def join(self, member: Member) -> None:
        """Adds a member. It gets requests once the router puts it back."""
        self.members.append(member)
        self.router.add(member)
        remember(member.url, member.engine.api_key)
        self._watch(member)
        self._tell_addresses()

    async def leave(self, member: Member) -> None:
        """Takes an engine from outside the run out of the fleet for good; what it generates goes on elsewhere."""
        if member.left:
            return
        member.out = member.left = True
        self.members.remove(member)
        self.router.remove(member)
        remember(member.url, None)
        self._tell_addresses()
        # `explain` lets its requests go on.
        await member.leave()

    def _tell_addresses(self) -> None:
        for listener in self._on_new_address:
            listener()

    def may_leave(self, member: Member) -> bool:
        """Returns whether a member is from outside the run, and others are left that do its part of a request."""
        others = [other for other in self.alive if other is not member and other.stage == member.stage]
        return member.external and bool(others)

    def on_new_address(self, listener: Callable[[], None]) -> None:
        """Calls `listener` on the loop's thread after an engine was restarted, which may change its URL, has joined or
        has left."""
        self._on_new_address.append(listener)
