"""Weight updates as transactions over all engines: begin holds them, the trainer transfers, commit lets them serve.

    serving --begin(v)--> updating(v) --commit(v)--> serving
                              └──────abort(v)──────> not serving, until a later begin and commit

An engine that does not hold the committed version does not serve. The engine's own update call drops its caches.
Engines that were restarted or have joined are sent weights while the others serve: `begin_joining`, then commit or
abort.

Where trainer and engines share GPUs, the engines' memory is released while the trainer works:

    serving --offload--> offloaded --onload("weights"), begin(v), onload, commit(v)--> serving
                             └──────onload of engines that kept their weights──────> serving
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from slime.rollout.engines.base import RunningEngine
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.member import MEMORY_PARTS, Member
from slime.types.errors import InvalidField, SlimeError, WrongState

log = logging.getLogger(__name__)


class EngineWeights:
    """The weights of all engines. Methods run on the fleet's loop. `version` is the last one committed."""

    def __init__(self, fleet: Fleet, wait_seconds: float) -> None:
        self.fleet = fleet
        self.wait_seconds = wait_seconds
        self.version = min((member.weight_version for member in fleet.members), default=0)
        self.pending: int | None = None
        # The reason why the engines do not serve outside of an update; None where they serve.
        self.stopped: str | None = None
        self._weights_lost = False
        # Members of the open update, each with its engine at the time the update began.
        self._taking_part: list[tuple[Member, RunningEngine]] = []
        # The version of the open update of restarted engines; None where there is none.
        self._joining: int | None = None
        # Engines that have left the rotation to get weights with their partners, and still have requests.
        self._lone: list[Member] = []
        self._lock = asyncio.Lock()

    async def begin(self, version: int, *, supersede: bool = False, interrupt: bool = False) -> list[Member]:
        """Stops admitting requests, waits for running ones, and holds the engines. Returns the members of the update.

        interrupt: ends running requests instead of waiting for them; they continue after the commit.
        Beginning the same version again is allowed. Raises WrongState while another update is open, unless `supersede`,
        or while the memory of the weights is released; DeadlineExceeded where running requests do not end in time (then
        the engines go on serving); InvalidField for a negative version.
        """
        if version < 0:
            raise InvalidField("weight_version", version, "at least 0")
        async with self._lock:
            if self.fleet.error is not None:
                raise self.fleet.error
            if self.pending is not None and self.pending != version and not supersede:
                raise WrongState(
                    f"weight update {self.pending} is open, {version} cannot begin",
                    field="weight_version",
                    value=version,
                    expected=str(self.pending),
                )
            self._check_memory("weights", "before a weight update")
            self.fleet.weights_as_started, self._joining = False, None
            await self._hold(f"weight update {version} is under way", interrupt=interrupt)
            self.pending, self.stopped = version, None
            return self._take_part(self.fleet.alive)

    async def begin_joining(self, version: int) -> list[Member]:
        """Holds the restarted engines that wait for weights, while the others serve; returns their members.

        Returns no members where `version` differs from the version of the engines that serve: the next update includes
        the restarted engines. Requests that wait for one of them in particular are then sent to other engines. Engines
        of pairs that cannot serve, because all engines that do the other part wait for weights, get `version` with
        them: both parts of a request must be done with the same weights. They get no requests while those that they
        have end, for which an update does not wait. Raises WrongState while an update is open, DeadlineExceeded where
        running requests of such pairs do not end in time.
        """
        try:
            while True:
                async with self._lock:
                    self._check_may_join(version)
                    if self.stopped is not None:
                        return []
                    if version != self.version and self.fleet.router.can_admit:
                        for member in self._waiting():
                            self.fleet.router.take_out(member, awaited=False)
                        return []
                    # An update may have put them back meanwhile.
                    self._lone = [member for member in self._lone if member not in self.fleet.router.in_rotation]
                    if version != self.version and self._waiting():
                        self._take_out_lone_engines()
                    if not (self._lone and self.fleet.router.in_flight):
                        for member in self._lone:
                            member.awaits_weights = not member.out
                        waiting = self._waiting()
                        await self.fleet.each(lambda member: member.hold(), waiting)
                        self._joining = version
                        return self._take_part(waiting)
                await self.fleet.router.drain(self.wait_seconds)
        finally:
            self._put_back_lone_engines()

    def _check_may_join(self, version: int) -> None:
        if self.fleet.error is not None:
            raise self.fleet.error
        if self.pending is not None:
            raise WrongState(
                f"weight update {self.pending} is open, engines cannot join",
                field="weight_version", value=version, expected="no open update",
            )  # fmt: skip

    def _waiting(self) -> list[Member]:
        return [member for member in self.fleet.alive if member.awaits_weights]

    def _take_out_lone_engines(self) -> None:
        """Takes engines whose partners are all out of rotation, so that no request can be admitted, out of it too."""
        for member in self.fleet.router.in_rotation:
            self.fleet.router.take_out(member, awaited=True)
            self._lone.append(member)

    def _put_back_lone_engines(self) -> None:
        """Puts back those that do not wait for weights now, unless an update or `onload` will do that."""
        lone, self._lone = self._lone, []
        for member in lone if self.pending is None and self.stopped is None else ():
            if not member.out and not member.awaits_weights:
                self.fleet.router.put_back(member)

    async def join(self, member: Member) -> None:
        """Adds an engine to the fleet. It serves at once if no weights were sent yet, else once it has been sent them.
        Raises WrongState while the engines' memory is released."""
        async with self._lock:
            for part in MEMORY_PARTS:
                self._check_memory(part, "before an engine joins")
            self.fleet.join(member)
            if self.fleet.weights_as_started:
                self.fleet.router.put_back(member)
            else:
                member.awaits_weights = True

    def _take_part(self, members: Collection[Member]) -> list[Member]:
        self._taking_part = [(member, member.engine) for member in members if not member.out]
        return [member for member, _ in self._taking_part]

    def _remaining(self) -> list[Member]:
        """Returns the members of the open update without those that were lost since it began."""
        return [member for member, engine in self._taking_part if member.engine is engine and not member.out]

    async def commit(self, version: int) -> None:
        """Lets the engines of the open update serve. Idempotent.

        Raises InvalidField naming an engine that holds another version (then no engine of the update serves);
        WrongState while memory is released, or where update `version` is not open.
        """
        async with self._lock:
            if self._joining == version:
                await self._check_versions(version)
                await self.fleet.each(self._let_serve, self._remaining())
                self.version, self._joining = version, None
                return
            if self.pending is None and self.version == version and self.stopped is None:
                return
            self._check_open(version)
            for part in MEMORY_PARTS:
                self._check_memory(part, "before the commit")
            await self._check_versions(version)
            self._weights_lost = False
            await self._serve(self._remaining())
            self.version, self.pending = version, None

    async def _check_versions(self, version: int) -> None:
        async def check(member: Member) -> None:
            held = await member.read_version()
            if held != version:
                raise InvalidField(
                    "weight_version", version, f"{held}, which engine {member.name} holds",
                    f"weight_version: got {version}, but engine {member.name} holds weight version {held}: it did "
                    "not take part in the update",
                )  # fmt: skip
            member.weight_version = held

        await self.fleet.each(check, self._remaining())

    async def _let_serve(self, member: Member) -> None:
        await member.serve()
        if member.awaits_weights:
            log.info("engine %s serves again, with weight version %d", member.name, member.weight_version)
        member.awaits_weights = False
        self.fleet.router.put_back(member)

    def _check_open(self, version: int) -> None:
        if self.pending != version:
            raise WrongState(
                f"weight update {version} is not open",
                field="weight_version", value=version, expected=f"the open update: {self.pending}",
            )  # fmt: skip

    async def abort(self, version: int, reason: str) -> None:
        """Closes the update and leaves its engines held.

        Waiting and later requests fail until an update is committed. Where an engine was lost during the update and the
        fleet goes on, they keep waiting instead, because the update is then repeated.
        """
        async with self._lock:
            if self._joining == version:
                self._joining = None
                return
            if self.pending is None and self.stopped is not None:
                return
            self._check_open(version)
            self.pending = None
            if self.fleet.restarts is not None or any(map(self.fleet.may_leave, self.fleet.members)):
                # When a transfer fails because an engine died, the fleet may not have noticed the death yet.
                with contextlib.suppress(SlimeError):
                    await self.fleet.each(self._check_answers, self._remaining())
            lost = len(self._remaining()) < len(self._taking_part)
            await self._stop(f"weight update {version} was aborted: {reason or 'no reason given'}", refuse=not lost)

    async def _check_answers(self, member: Member) -> None:
        await member.client.model_info(self.fleet.options.health_timeout)

    async def offload(self, parts: Collection[str]) -> None:
        """Stops serving and releases these parts of the engines' GPU memory; all of them where `parts` is empty.
        Idempotent.

        Raises WrongState while a weight update is open, or where an engine was started without its memory saver;
        DeadlineExceeded where running requests do not end in time.
        """
        wanted = _parts(parts)
        async with self._lock:
            if self.fleet.error is not None:
                raise self.fleet.error
            if self.pending is not None:
                raise WrongState(
                    f"weight update {self.pending} is open: memory cannot be released",
                    field="weight_version",
                    value=self.pending,
                    expected="a committed or aborted update",
                )
            for member in self.fleet.members:
                if member.abilities.memory_saver is False:
                    raise WrongState(
                        f"engine {member.name} was started without --enable-memory-saver: it cannot release memory",
                        field=member.name,
                        expected="--enable-memory-saver",
                    )
            reason = self.stopped or "the engines' memory is released"
            await self._hold(reason)
            await self._stop(reason)
            if "weights" in wanted and not all(member.abilities.keeps_weights for member in self.fleet.members):
                self._weights_lost = True
            await self.fleet.each(lambda member: member.release(wanted))

    async def onload(self, parts: Collection[str]) -> None:
        """Allocates these parts of the engines' memory again; all of them where `parts` is empty.

        Once every part is back and no update is open, engines that kept their weights serve again; engines that lost
        them need an update.
        """
        wanted = _parts(parts)
        async with self._lock:
            if self.fleet.error is not None:
                raise self.fleet.error
            was_released = self._released()
            await self.fleet.each(lambda member: member.resume(wanted))
            if self.pending is not None or not was_released or self._released():
                return
            if self._weights_lost:
                await self._stop("the engines' weights were released, and none were sent since")
            else:
                await self._serve()

    def check_serving(self) -> None:
        """Raises WrongState where engines wait for weights or memory: a Generate call would otherwise wait forever."""
        if self.stopped is not None:
            raise WrongState(
                f"the engines do not serve: {self.stopped}",
                field="weight_version",
                value=self.version,
                expected="a committed update",
            )

    async def _hold(self, reason: str, *, interrupt: bool = False) -> None:
        """Shuts the router, waits for running requests or interrupts them, and holds all engines."""
        was_serving = self.pending is None and self.stopped is None
        await self.fleet.router.shut(reason)
        try:
            if interrupt:
                await self.fleet.interrupt(self.wait_seconds)
            await self.fleet.router.drain(self.wait_seconds)
        except BaseException:
            if was_serving:
                await self.fleet.router.open()
            raise
        await self.fleet.each(lambda member: member.hold())

    async def _stop(self, reason: str, *, refuse: bool = True) -> None:
        self.stopped = reason
        await self.fleet.router.shut(reason, refuse=refuse)

    async def _serve(self, members: Collection[Member] | None = None) -> None:
        with_weights = [member for member in self.fleet.alive if not member.awaits_weights]
        await self.fleet.each(self._let_serve, with_weights if members is None else members)
        self.stopped = None
        await self.fleet.router.open()

    def _released(self) -> set[str]:
        return {part for member in self.fleet.members for part in member.released}

    def _check_memory(self, part: str, when: str) -> None:
        if part in self._released():
            raise WrongState(
                f"the engines' {part} are released: they must be taken back {when}",
                field="parts",
                value=part,
                expected="a call of Onload",
            )


def _parts(parts: Collection[str]) -> set[str]:
    for part in parts:
        if part not in MEMORY_PARTS:
            raise InvalidField("parts", part, "one of " + ", ".join(MEMORY_PARTS))
    return set(parts) or set(MEMORY_PARTS)
