"""Watches the engines of a rollout service, and restarts them when they die or hang.

    in rotation --dies, or misses two probes--> out --restarted--> awaits weights --weights sent--> in rotation

An engine from outside the run leaves the fleet instead, while others are left. Otherwise, without restarts or after too
many of them, the whole fleet fails: every call raises EngineError with the name and the last lines of the engine that
was lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import HostedEngine, RunningEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.keys import remember
from slime.rollout.engines.kind import PREFILL
from slime.rollout.engines.process import EngineProcess, stop_all
from slime.rollout.fleet.concurrency import ConcurrencyLimit
from slime.rollout.fleet.joining import ChangingMembers
from slime.rollout.fleet.load_watch import follow_load
from slime.rollout.fleet.member import LEARN_SECONDS, Member
from slime.rollout.fleet.restarts import RestartLimits, Restarts
from slime.rollout.fleet.router import Router
from slime.rollout.metrics import CONCURRENCY, ENGINES
from slime.types.errors import DeadlineExceeded, EngineError, SlimeError, counted

log = logging.getLogger(__name__)
T = TypeVar("T")

LAST_CALL_SECONDS = 2.0
# Seconds that a process may take to end after its connections broke.
DEATH_SECONDS = 2.0


@dataclass(frozen=True)
class FleetOptions:
    """Options of a fleet; times in seconds.

    concurrency: samples in flight per engine, at most where the limit is tuned. tunes_concurrency: whether the limit of
    each engine follows the engine's load. routed_experts: whether answers hold the experts chosen for each token.
    nuclei: whether answers hold the token ids that top-p and top-k left to sample from, where the engine returns them.
    stream_interval: tokens after which engines hand over what they have; 0: only whole answers; None: the default of
    each engine's kind. restarts: None makes the whole fleet fail with its first lost engine.
    """

    concurrency: int = 512
    tunes_concurrency: bool = False
    request_timeout: float = 14400.0
    health_interval: float = 30.0
    health_timeout: float = 30.0
    health_first_wait: float = 0.0
    routed_experts: bool = False
    nuclei: bool = False
    stream_interval: int | None = None
    restarts: RestartLimits | None = None


class WatchedEngines(ChangingMembers):
    """The members of a fleet, in rotation or out of it, and the error that ends the fleet."""

    def __init__(self, engines: Sequence[RunningEngine], loop: LoopThread, options: FleetOptions | None = None) -> None:
        self.loop = loop
        self.options = options or FleetOptions()
        self.members = [self.connect(engine) for engine in engines]
        for engine in engines:
            # Plug-ins may call the engines directly, and then need their keys.
            remember(engine.url, engine.api_key)
        self.router: Router[Member] = Router(self.members, self._limit_of, lambda member: member.stage)
        self.error: EngineError | None = None
        self._failed: asyncio.Future[None] | None = None
        self._listeners: list[Callable[[EngineError], None]] = []
        self._on_new_address: list[Callable[[], None]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self.restarts = None if self.options.restarts is None else Restarts(self.options.restarts)
        self._returning: set[asyncio.Task[None]] = set()
        # Number of engines from outside the run that died or hung, and left.
        self.num_left = 0
        # False once weights were sent: a restarted engine then holds older ones, those of its checkpoint.
        self.weights_as_started = True

    def _client(self, engine: RunningEngine) -> EngineClient:
        timeout = self.options.request_timeout
        return EngineClient(engine.url, engine.name, generate_timeout_seconds=timeout, api_key=engine.api_key)

    def _limit_of(self, member: Member) -> int:
        return self.options.concurrency if member.limit is None else member.limit.value

    @property
    def capacity(self) -> int:
        """The number of samples that may be in flight at all engines together, as the limits are now."""
        return sum(map(self._limit_of, self.answering))

    @property
    def concurrency_metrics(self) -> dict[str, float]:
        """The tuned limits of samples in flight per engine: mean, /min and /max; empty where limits are fixed."""
        limits = [member.limit.value for member in self.members if member.limit is not None]
        if not limits:
            return {}
        mean = sum(limits) / len(limits)
        return {CONCURRENCY: mean, f"{CONCURRENCY}/min": float(min(limits)), f"{CONCURRENCY}/max": float(max(limits))}

    @property
    def engine_metrics(self) -> dict[str, float]:
        """rollout/engines, the number of engines, and `concurrency_metrics`."""
        return {ENGINES: float(len(self.members))} | self.concurrency_metrics

    @property
    def num_restarts(self) -> int:
        """The number of engine losses that led to a restart."""
        return 0 if self.restarts is None else self.restarts.count

    @property
    def num_lost(self) -> int:
        """The number of engines that died or hung, and were restarted or left the fleet."""
        return self.num_restarts + self.num_left

    @property
    def seeded(self) -> bool:
        """True where the sampling of every engine follows `sampling_seed`."""
        return all(member.abilities.seeded for member in self.members)

    def start(self, *, absent_leave: bool = False) -> None:
        """Reads the abilities of all engines, and watches them. Raises EngineError or DeadlineExceeded for silent ones.

        absent_leave: engines from outside the run that do not answer leave the fleet, if others answer.
        """
        self.loop.run(self._start(absent_leave), timeout=LEARN_SECONDS + 30)

    async def _start(self, absent_leave: bool) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        # Read here, so that asyncio does not warn about an exception that was never retrieved.
        self._failed.add_done_callback(lambda future: future.cancelled() or future.exception())
        answers = await asyncio.gather(*(each.learn_in_time() for each in self.members), return_exceptions=True)
        for member, error in zip(list(self.members), answers, strict=True):
            if error is None:
                self._watch(member)
            elif absent_leave and isinstance(error, SlimeError) and member.external and None in answers:
                log.error("engine %s at %s does not answer and leaves the run: %s", member.name, member.url, error)
                await self.leave(member)
            else:
                raise error

    def _watch(self, member: Member) -> None:
        self.router.in_pairs |= bool(member.stage)
        self._watchers.append(asyncio.create_task(self._watch_health(member)))
        self._tune(member)
        if isinstance(member.engine, EngineProcess):
            self._watchers.append(asyncio.create_task(self._watch_process(member)))

    def _tune(self, member: Member) -> None:
        """Gives a member a limit that follows its load, where that is asked for."""
        if self.options.tunes_concurrency and member.stage != PREFILL:
            member.limit = ConcurrencyLimit(self.options.concurrency)
            self._watchers.append(asyncio.create_task(follow_load(member, self.router)))

    def stop(self, grace_seconds: float | None = None) -> None:
        """Stops watching, and stops the engines that this service started, all at the same time."""
        if self.restarts is not None:
            self.restarts.stop()
        if self.loop.is_occupied():
            log.warning("a plug-in (reward, generate function, ...) does not return, and occupies the event loop")
        else:
            self.loop.run(self._close(), timeout=30)
        if self.restarts is not None:
            self.restarts.threads.shutdown(wait=False)
        stop_all([member.engine for member in self.members], grace_seconds)

    async def _close(self) -> None:
        for watcher in (watchers := [*self._watchers, *self._returning]):
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(self._last_call(member) for member in self.members))
        for member in self.members:
            await member.client.close()
            remember(member.url, None)

    async def _last_call(self, member: Member) -> None:
        """Aborts the requests of an engine of this run that ends only after its requests; waits for their answers."""
        running = isinstance(member.engine, EngineProcess | HostedEngine) and not member.exited
        if not (running and member.kind.aborts_before_stop):
            return
        try:
            await asyncio.wait_for(member.client.abort(), LAST_CALL_SECONDS)
            await self.router.drain(LAST_CALL_SECONDS)
        except (SlimeError, TimeoutError) as error:
            log.info("stopping engine %s while requests still run: %s", member.name, error)

    def on_failure(self, listener: Callable[[EngineError], None]) -> Callable[[], None]:
        """Calls `listener` once, on the loop's thread, when the fleet fails. Returns a function that removes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _watch_process(self, member: Member) -> None:
        while self.error is None:
            await asyncio.sleep(0.1)
            if member.exited and not member.out:
                await self._lose(member, None)

    async def _watch_health(self, member: Member) -> None:
        await asyncio.sleep(self.options.health_first_wait)
        misses, engine, begun = 0, member.engine, time.monotonic()
        while self.error is None and not member.left:
            # From beginning to beginning: a hanging engine is asked again as soon as its first probe has failed.
            await asyncio.sleep(begun + self.options.health_interval - time.monotonic())
            begun = time.monotonic()
            if member.out or member.engine is not engine:
                # The successor of a lost engine may be back within one interval: it starts without missed probes.
                misses, engine = 0, member.engine
            if member.out:
                continue
            try:
                await member.probe(self.options.health_timeout)
                misses, member.healthy = 0, True
            except SlimeError as error:
                if member.engine is not engine or member.out:
                    continue
                # A busy engine may miss one probe.
                misses, member.healthy = misses + 1, False
                if misses == 2:
                    missed = EngineError(f"engine {member.name} failed two health probes: {error}", field=member.name)
                    await self._lose(member, missed)

    async def _lose(self, member: Member, error: EngineError | None) -> None:
        """Takes a member out of rotation whose process has died or, with `error`, does not answer, and restarts it.
        Where restarts are off or the engine is not a process of this service, the fleet fails; but an engine from
        outside the run leaves it."""
        member.healthy = False
        if self.may_leave(member) or member.left:
            if not member.left:
                self.num_left += 1
                log.error(
                    "engine %s at %s is lost and leaves the run; its requests in flight (%s) go on elsewhere. Once it "
                    "serves again, `slime-rollout engines add` lets it join. Reason: %s",
                    member.name, member.url, counted(self.router.load_of(member), "sample"), error,
                )  # fmt: skip
            await self.leave(member)
            return
        if self.restarts is None or not isinstance(member.engine, EngineProcess):
            await self.end(await asyncio.to_thread(_death, member, error))
            return
        if member.out or self.error is not None:
            return
        member.out, member.awaits_weights = True, False
        self.restarts.count += 1
        in_flight = self.router.load_of(member)
        self.router.take_out(member, awaited=True)
        reason = await asyncio.to_thread(_death, member, error)
        log.error(
            "engine %s is lost and is being started again; its requests in flight (%s) go on elsewhere. In rotation: "
            "%s. Reason: %s",
            member.name, counted(in_flight, "sample"),
            ", ".join(other.name for other in self.router.in_rotation) or "none", reason.message,
        )  # fmt: skip
        task = asyncio.create_task(self._start_again(member, member.engine, reason, time.monotonic()))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _start_again(self, member: Member, gone: EngineProcess, reason: SlimeError, since: float) -> None:
        assert self.restarts is not None
        while True:
            try:
                self.restarts.check(member.name, reason.message, since)
            except EngineError as error:
                await self.end(error)
                return
            try:
                loop, starts = asyncio.get_running_loop(), self.restarts
                engine = await loop.run_in_executor(starts.threads, starts.start, gone)
                await self._take_back(member, engine)
                break
            except SlimeError as error:
                if self.restarts.stopped:
                    return
                log.error("engine %s did not start again: %s", member.name, error.message)
                reason = error
            except Exception as error:
                # An unexpected error of the system: end the fleet, or requests for this engine would wait forever.
                log.exception("engine %s cannot be started again", member.name)
                await self.end(EngineError(f"engine {member.name} cannot be started again: {error}", field=member.name))
                return
        log.warning(
            "engine %s was started again in %.1f s, and %s",
            member.name, time.monotonic() - since, "waits for weights" if member.awaits_weights else "serves",
        )  # fmt: skip

    async def _take_back(self, member: Member, engine: EngineProcess) -> None:
        """Gives a member its restarted engine. Raises SlimeError where that does not answer; then it is stopped."""
        old_client, old_url = member.client, member.url
        member.replace(engine, self._client(engine))
        if self.restarts is not None:
            self.restarts.taken(engine)
        try:
            await member.learn()
        except BaseException:
            await asyncio.to_thread(engine.stop, 0)
            raise
        finally:
            await old_client.close()
        remember(old_url, None)
        remember(engine.url, engine.api_key)
        self._tell_addresses()
        member.out, member.healthy = False, True
        if self.weights_as_started:
            self.router.put_back(member)
        else:
            member.awaits_weights = True

    async def end(self, error: EngineError) -> EngineError:
        if self.error is not None:
            return self.error
        self.error = error
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
        await self.router.fail(error)
        for listener in list(self._listeners):
            listener(error)
        return error

    async def guard(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Awaits `coroutine`, but cancels it and raises EngineError at once when the fleet fails."""
        assert self._failed is not None, "the fleet was not started"
        task = asyncio.ensure_future(coroutine)
        try:
            waiting: set[asyncio.Future[Any]] = {task, self._failed}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self.error is not None:
                raise self.error
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=10)

    async def explain(self, member: Member, engine: RunningEngine, error: SlimeError) -> None:
        """Decides how to go on after a call of `engine`, the member's engine at the time, failed with `error`.

        Returns if the engine is lost and is being replaced: the caller may try again. Raises the fleet's error if the
        loss ends the fleet, and `error` itself if the engine is not lost.
        """
        if isinstance(engine, EngineProcess) and member.engine is engine and not member.out:
            # A dying process breaks its connections, or fails its requests, before its exit status can be read.
            may_die = "is gone" in error.message or (self.restarts is not None and _is_failure(error))
            deadline = time.monotonic() + DEATH_SECONDS
            while may_die and not member.exited and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            hangs = isinstance(error, DeadlineExceeded) and self.restarts is not None
            if member.exited or hangs:
                found = EngineError(error.message, field=member.name)
                await self._lose(member, found)
        if "is gone" in error.message and not member.out and self.may_leave(member):
            try:
                await member.client.model_info(self.options.health_timeout)
            except SlimeError:
                await self._lose(member, EngineError(error.message, field=member.name))
        if self.error is not None:
            raise self.error from error
        if member.engine is engine and not member.out:
            raise error

    async def each(
        self, action: Callable[[Member], Coroutine[Any, Any, Any]], members: Collection[Member] | None = None
    ) -> None:
        """Runs `action` on these members, or on all, at the same time, except members that are out or get lost. Raises
        the fleet's error where a loss ends the fleet."""
        await asyncio.gather(*(self.call(member, action) for member in (self.members if members is None else members)))

    async def call(self, member: Member, action: Callable[[Member], Coroutine[Any, Any, Any]]) -> None:
        """Runs `action` on a member, unless it is out or is lost meanwhile."""
        if member.out:
            return
        engine = member.engine
        try:
            await action(member)
        except (EngineError, DeadlineExceeded) as error:
            await self.explain(member, engine, error)


def _is_failure(error: SlimeError) -> bool:
    """Returns whether an engine answered with a server error (5xx)."""
    return isinstance(error, EngineError) and error.value.isdigit() and int(error.value) >= 500


def _death(member: Member, error: EngineError | None) -> EngineError:
    if member.exited:
        try:
            member.engine.raise_if_dead()
        except EngineError as death:
            return death
    return error or EngineError(f"engine {member.name} failed", field=member.name)
