"""The engines of a rollout service: watched, called, and started again when they die or hang.

    in rotation --dies, or misses two probes--> out --started again--> awaits weights --sent them--> in rotation

What an engine that is out had in flight is sent again, to the others or to its successor. Without restarts, or after
too many of them, the fleet fails: every call on it raises EngineError with the engine's name and its last lines.
Methods with `async` run on the fleet's loop; `generate` and `abort` may be awaited from any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import HostedEngine, RunningEngine
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.keys import remember
from slime.rollout.engines.process import EngineProcess, stop_all
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.restarts import RestartLimits, Restarts
from slime.rollout.fleet.router import Router, Withdrawn
from slime.types.errors import DeadlineExceeded, EngineError, SlimeError, counted

log = logging.getLogger(__name__)

T = TypeVar("T")
OnOutput: TypeAlias = Callable[[dict[str, Any]], None]

LAST_CALL_SECONDS = 2.0
# Seconds that a process may take to end after its connections broke.
DEATH_SECONDS = 2.0
# The finish reason of a request that a weight update ended: it goes on afterwards, with the tokens that it has.
INTERRUPTED = "interrupted"
INTERRUPT_AGAIN_SECONDS = 1.0


@dataclass(frozen=True)
class FleetOptions:
    """concurrency: samples in flight an engine; times in seconds. routed_experts: whether answers tell the experts.
    restarts: None: the fleet fails with an engine."""

    concurrency: int = 512
    request_timeout: float = 14400.0
    health_interval: float = 30.0
    health_timeout: float = 30.0
    health_first_wait: float = 0.0
    routed_experts: bool = False
    restarts: RestartLimits | None = None


class Fleet:
    def __init__(self, engines: Sequence[RunningEngine], loop: LoopThread, options: FleetOptions | None = None) -> None:
        self.loop = loop
        self.options = options or FleetOptions()
        self.members = [Member(engine, self._client(engine)) for engine in engines]
        for engine in engines:
            # Functions of the user may call the engines by themselves.
            remember(engine.url, engine.api_key)
        self.router: Router[Member] = Router(self.members, self.options.concurrency)
        self.error: EngineError | None = None
        self._failed: asyncio.Future[None] | None = None
        self._listeners: list[Callable[[EngineError], None]] = []
        self._on_new_address: list[Callable[[], None]] = []
        # The engine of each request that was sent.
        self._sent: dict[str, Member] = {}
        self._interrupting = False
        self._watchers: list[asyncio.Task[None]] = []
        self.restarts = None if self.options.restarts is None else Restarts(self.options.restarts)
        self._returning: set[asyncio.Task[None]] = set()
        # False once weights were sent: an engine that starts again has those of its checkpoint.
        self.weights_as_started = True

    def _client(self, engine: RunningEngine) -> EngineClient:
        timeout = self.options.request_timeout
        return EngineClient(engine.url, engine.name, generate_timeout_seconds=timeout, api_key=engine.api_key)

    @property
    def alive(self) -> list[Member]:
        """The members whose process runs, in rotation or not."""
        return [member for member in self.members if not member.out]

    @property
    def num_restarts(self) -> int:
        """Counts the engines that were lost and started again, each as often as it was."""
        return 0 if self.restarts is None else self.restarts.count

    @property
    def seeded(self) -> bool:
        """True where the sampling of every engine follows `sampling_seed`."""
        return all(member.abilities.seeded for member in self.members)

    def start(self) -> None:
        """Raises EngineError where an engine does not answer."""
        self.loop.run(self._start(), timeout=self.options.health_timeout + 60)

    async def _start(self) -> None:
        self._failed = asyncio.get_running_loop().create_future()
        # Read here, so that a failure that no call waits for is not reported as forgotten.
        self._failed.add_done_callback(lambda future: future.cancelled() or future.exception())
        for member in self.members:
            await member.learn()
            self._watchers.append(asyncio.create_task(self._watch_health(member)))
            if isinstance(member.engine, EngineProcess):
                self._watchers.append(asyncio.create_task(self._watch_process(member)))

    def stop(self, grace_seconds: float | None = None) -> None:
        """Ends the engines that are ours, all at the same time."""
        if self.restarts is not None:
            self.restarts.stop()
        self.loop.run(self._close(), timeout=30)
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
        """Aborts the requests of an engine of ours that ends only once they have, and waits for their answers."""
        ours = isinstance(member.engine, EngineProcess | HostedEngine) and not member.exited
        if not (ours and member.kind.aborts_before_stop):
            return
        try:
            await asyncio.wait_for(member.client.abort(), LAST_CALL_SECONDS)
            await self.router.drain(LAST_CALL_SECONDS)
        except (SlimeError, TimeoutError) as error:
            log.info("engine %s is stopped while it still works: %s", member.name, error)

    def on_new_address(self, listener: Callable[[], None]) -> None:
        """`listener` is called on the loop's thread when an engine that was started again has another URL."""
        self._on_new_address.append(listener)

    def on_failure(self, listener: Callable[[EngineError], None]) -> Callable[[], None]:
        """`listener` is called once, on the loop's thread, when an engine fails. Returns how to stop listening."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _watch_process(self, member: Member) -> None:
        while self.error is None:
            await asyncio.sleep(0.1)
            if member.exited and not member.out:
                await self._lose(member, None)

    async def _watch_health(self, member: Member) -> None:
        await asyncio.sleep(self.options.health_first_wait)
        misses, engine = 0, member.engine
        while self.error is None:
            await asyncio.sleep(self.options.health_interval)
            if member.out or member.engine is not engine:
                # Misses of an engine that is gone are not its successor's, which may be back within one interval.
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
                    await self._lose(
                        member,
                        EngineError(f"engine {member.name} failed two health probes: {error}", field=member.name),
                    )

    async def _lose(self, member: Member, error: EngineError | None) -> None:
        """Takes a member out whose process has died or, with `error`, does not answer, and has it started again. Where
        that cannot be, the fleet fails."""
        member.healthy = False
        if self.restarts is None or not isinstance(member.engine, EngineProcess):
            await self._fail(member, error)
            return
        if member.out or self.error is not None:
            return
        member.out, member.awaits_weights = True, False
        self.restarts.count += 1
        in_flight = self.router.load_of(member)
        self.router.take_out(member, awaited=True)
        reason = await asyncio.to_thread(_death, member, error)
        log.error(
            "engine %s is out and is started again; what it had in flight (%s) is sent again. In rotation: %s. The "
            "reason: %s",
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
                self.restarts.check(member.name, reason.message)
            except EngineError as error:
                await self._end(error)
                return
            try:
                engine = await asyncio.to_thread(self.restarts.start, gone)
                await self._take_back(member, engine)
                break
            except SlimeError as error:
                log.error("engine %s did not start again: %s", member.name, error.message)
                reason = error
            except Exception as error:
                # An error of the system: what waits for this engine would wait for ever.
                log.exception("engine %s cannot be started again", member.name)
                await self._end(
                    EngineError(f"engine {member.name} cannot be started again: {error}", field=member.name)
                )
                return
        log.warning(
            "engine %s was started again in %.1f s, and %s",
            member.name, time.monotonic() - since, "waits for weights" if member.awaits_weights else "serves",
        )  # fmt: skip

    async def _take_back(self, member: Member, engine: EngineProcess) -> None:
        """Raises SlimeError where the engine that has just started is gone again; then it is stopped."""
        former, remaining = member.client, member.url
        member.replace(engine, self._client(engine))
        try:
            await member.learn()
        except BaseException:
            await asyncio.to_thread(engine.stop, 0)
            raise
        finally:
            await former.close()
        remember(remaining, None)
        remember(engine.url, engine.api_key)
        for listener in self._on_new_address:
            listener()
        member.out, member.healthy = False, True
        if self.weights_as_started:
            self.router.put_back(member)
        else:
            member.awaits_weights = True

    async def _fail(self, member: Member, error: EngineError | None) -> EngineError:
        """Makes the fleet fail with `error`, or with what is known of the death of the member's process."""
        member.healthy = False
        return await self._end(await asyncio.to_thread(_death, member, error))

    async def _end(self, found: EngineError) -> EngineError:
        if self.error is not None:
            return self.error
        self.error = found
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(found)
        await self.router.fail(found)
        for listener in list(self._listeners):
            listener(found)
        return found

    async def guard(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it, but ends at once with EngineError when an engine fails."""
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

    async def generate(
        self,
        input_ids: list[list[int]],
        sampling_params: list[dict[str, Any]],
        *,
        rids: list[str] | None = None,
        images: list[list[str]] | None = None,
        session_id: str | None = None,
        member: Member | None = None,
        on_output: OnOutput | None = None,
    ) -> list[dict[str, Any]]:
        """Sends one request of several sequences to one engine; returns answers in SGLang's format, in order.

        images: data URIs, in each sequence a placeholder token for each of its own. on_output: called on the fleet's
        loop with the answer to a single sequence while it grows.

        Raises EngineError when the engine dies, fails, or answers with another number of sequences; InvalidField when
        it refuses the request.
        """
        return await self.loop.bridge(
            self._generate(input_ids, sampling_params, rids, images, session_id, member, on_output)
        )

    async def _generate(
        self,
        input_ids: list[list[int]],
        sampling_params: list[dict[str, Any]],
        rids: list[str] | None,
        images: list[list[str]] | None,
        session_id: str | None,
        member: Member | None,
        on_output: OnOutput | None = None,
    ) -> list[dict[str, Any]]:
        if not self.members:
            raise EngineError(
                "this run has no engine to generate with (--debug-train-only)", field="--debug-train-only",
                expected="a rollout function that needs none",
            )  # fmt: skip
        headers = {"X-SMG-Routing-Key": session_id} if session_id else None
        keys = rids or ()
        extra: dict[str, Any] = {"image_data": images} if any(images or ()) else {}
        if self.options.routed_experts:
            extra["return_routed_experts"] = True
        outputs: Any = None
        answered = begun = False

        def pass_on(output: Any) -> None:
            nonlocal begun
            begun = True
            assert on_output is not None
            on_output(output)

        try:
            while not answered:
                async with self.router.admit(len(input_ids), session_id, member, keys) as chosen:
                    self._sent.update(dict.fromkeys(keys, chosen))
                    engine = chosen.engine
                    try:
                        if on_output is None:
                            outputs = await chosen.client.generate(
                                input_ids, sampling_params, rid=rids, return_logprob=True, headers=headers, **extra
                            )
                        else:
                            (ids,), (params,), rid = input_ids, sampling_params, rids[0] if rids else None
                            output = await chosen.client.generate(
                                ids,
                                params,
                                rid=rid,
                                return_logprob=True,
                                headers=headers,
                                on_output=pass_on,
                                **extra,
                            )
                            outputs = [output]
                        answered = True
                    except EngineError as error:
                        # An engine that is lost gave nothing back: the whole request is sent again.
                        await self._explain(chosen, engine, error)
                        if begun:
                            # The caller has passed on tokens that another try need not repeat.
                            raise
                    finally:
                        for key in keys:
                            self._sent.pop(key, None)
                    if self._interrupting:
                        _mark_interrupted(outputs)
        except Withdrawn:
            return [_never_sent(rid) for rid in keys or [""] * len(input_ids)]
        if not isinstance(outputs, list) or len(outputs) != len(input_ids):
            count = len(outputs) if isinstance(outputs, list) else 1
            raise EngineError(
                f"engine {chosen.name} answered {counted(count, 'sequence')} to a request of {len(input_ids)}",
                field=chosen.name,
                value=count,
            )
        return outputs

    async def _explain(self, member: Member, engine: RunningEngine, error: SlimeError) -> None:
        """Returns where a call failed because `engine`, which was the member's, is lost and is being replaced. Raises
        the fleet's error where its loss ends the fleet, and `error` where it is not lost."""
        if isinstance(engine, EngineProcess) and member.engine is engine and not member.out:
            # A dying process breaks its connections, or fails its requests, before it can be waited for.
            may_die = "is gone" in error.message or (self.restarts is not None and _is_failure(error))
            deadline = time.monotonic() + DEATH_SECONDS
            while may_die and not member.exited and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            hangs = isinstance(error, DeadlineExceeded) and self.restarts is not None
            if member.exited or hangs:
                found = EngineError(error.message, field=member.name)
                await self._lose(member, found)
        if self.error is not None:
            raise self.error from error
        if member.engine is engine and not member.out:
            raise error

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """Ends requests early: those of `rids`, or all. Their answers come with finish reason "abort"."""
        await self.loop.bridge(self._abort(rids))

    async def _abort(self, rids: Sequence[str] | None) -> None:
        self.router.withdraw(rids)
        if rids is None:
            await self.each(lambda member: member.client.abort())
            return
        sent = {(self._sent[rid], rid) for rid in rids if rid in self._sent}
        await asyncio.gather(*(self._call(member, partial(_abort_request, rid)) for member, rid in sent))

    async def interrupt(self, timeout: float) -> None:
        """Ends what is in flight; its answers have what was generated so far, and the finish reason `INTERRUPTED`.

        To be called while the router admits nothing. Raises DeadlineExceeded where requests still run after `timeout`.
        """
        deadline = time.monotonic() + timeout
        self._interrupting = True
        try:
            while self.router.in_flight:
                # Repeated, because an abort that overtakes its request finds nothing to end.
                await self.each(lambda member: member.client.abort())
                left = deadline - time.monotonic()
                if left <= INTERRUPT_AGAIN_SECONDS:
                    await self.router.drain(max(0.0, left))
                    return
                with contextlib.suppress(DeadlineExceeded):
                    await self.router.drain(INTERRUPT_AGAIN_SECONDS)
        finally:
            self._interrupting = False

    async def each(
        self, action: Callable[[Member], Coroutine[Any, Any, Any]], members: Collection[Member] | None = None
    ) -> None:
        """`action` on these members, or all, at once; those that are out or lost meanwhile are left alone. Raises the
        fleet's error where a death ends the fleet."""
        await asyncio.gather(*(self._call(member, action) for member in (self.members if members is None else members)))

    async def _call(self, member: Member, action: Callable[[Member], Coroutine[Any, Any, Any]]) -> None:
        if member.out:
            return
        engine = member.engine
        try:
            await action(member)
        except (EngineError, DeadlineExceeded) as error:
            await self._explain(member, engine, error)


def _is_failure(error: SlimeError) -> bool:
    """Tells whether an engine answered that it failed (5xx)."""
    return isinstance(error, EngineError) and error.value.isdigit() and int(error.value) >= 500


async def _abort_request(rid: str, member: Member) -> None:
    await member.client.abort(rid)


def _never_sent(rid: str) -> dict[str, Any]:
    """Returns the answer to a request that was aborted before an engine had it."""
    reason = {"type": "abort", "message": "aborted before an engine had it"}
    return {
        "text": "",
        "output_ids": [],
        "meta_info": {"id": rid, "finish_reason": reason, "output_token_logprobs": []},
    }


def _mark_interrupted(outputs: Any) -> None:
    for output in outputs if isinstance(outputs, list) else ():
        meta = output.get("meta_info") or {}
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            # An engine need not say this of a request that it had not begun.
            meta.setdefault("output_token_logprobs", [])
            meta["finish_reason"] = {"type": INTERRUPTED}


def _death(member: Member, error: EngineError | None) -> EngineError:
    if member.exited:
        try:
            member.engine.raise_if_dead()
        except EngineError as death:
            return death
    return error or EngineError(f"engine {member.name} failed", field=member.name)
