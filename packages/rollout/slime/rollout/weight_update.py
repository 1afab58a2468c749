"""A weight update is a transaction over all engines: begin pauses them, the trainer transfers, commit lets them serve.

    serving --begin(v)--> updating(v) --commit(v)--> serving
                              └──────abort(v)──────> not serving, until a later begin and commit

An engine that does not hold the committed version does not serve. The engine's own update call drops its caches.
"""

from __future__ import annotations

import asyncio

from slime.rollout.fleet import Fleet, Member
from slime.types.errors import EngineError, WrongState


class WeightUpdates:
    """Methods run on the fleet's loop. `version` is the last one committed."""

    def __init__(self, fleet: Fleet, wait_seconds: float) -> None:
        self.fleet = fleet
        self.wait_seconds = wait_seconds
        self.version = min((member.weight_version for member in fleet.members), default=0)
        self.pending: int | None = None
        self.aborted: str | None = None
        self._lock = asyncio.Lock()

    async def begin(self, version: int, *, supersede: bool = False) -> list[Member]:
        """Stops admitting requests, waits for those that run, pauses the engines. Returns the members of the update.

        Beginning the same version again is allowed. Raises WrongState while another one is open, unless `supersede`;
        DeadlineExceeded where running requests do not end in time (then the engines go on serving).
        """
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
            was_serving = self.pending is None and self.aborted is None
            await self.fleet.router.shut(f"weight update {version} is under way")
            try:
                await self.fleet.router.drain(self.wait_seconds)
            except BaseException:
                if was_serving:
                    await self.fleet.router.open()
                raise
            await self.fleet.each(lambda member: member.client.pause("retract"))
            self.pending, self.aborted = version, None
            return list(self.fleet.members)

    async def commit(self, version: int) -> None:
        """Raises EngineError naming an engine that holds another version; then nothing serves.

        Committing again is the same as once."""
        async with self._lock:
            if self.pending is None and self.version == version and self.aborted is None:
                return
            if self.pending != version:
                raise WrongState(
                    f"weight update {version} is not open",
                    field="weight_version",
                    value=version,
                    expected=f"the one begun: {self.pending}",
                )
            for member in self.fleet.members:
                held = await self.fleet.read_version(member)
                if held != version:
                    raise EngineError(
                        f"engine {member.name} holds weight version {held}, expected {version}: "
                        "it did not take part in the update",
                        field=member.name, value=held, expected=str(version),
                    )  # fmt: skip
                member.weight_version = held
            await self.fleet.each(lambda member: member.client.continue_())
            self.version, self.pending = version, None
            await self.fleet.router.open()

    async def abort(self, version: int, reason: str) -> None:
        """Leaves the engines paused. Requests that wait, and later ones, fail until an update is committed."""
        async with self._lock:
            if self.pending is None and self.aborted is not None:
                return
            if self.pending != version:
                raise WrongState(
                    f"weight update {version} is not open",
                    field="weight_version",
                    value=version,
                    expected=f"{self.pending}",
                )
            self.pending, self.aborted = None, f"weight update {version} was aborted: {reason or 'no reason given'}"
            await self.fleet.router.shut(self.aborted, refuse=True)

    def check_serving(self) -> None:
        """Raises WrongState after an abort: without weights to serve, a rollout would wait for ever."""
        if self.aborted is not None:
            raise WrongState(
                f"the engines do not serve: {self.aborted}",
                field="weight_version",
                value=self.version,
                expected="a committed update",
            )
