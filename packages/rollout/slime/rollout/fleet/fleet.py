"""The engines of a rollout service as a whole: sends them requests, and ends requests early.

Requests in flight at an engine that is lost go on at other engines or at its successor (see `watched.py`), from the
tokens that the engine had streamed; without any they are sent again.
Coroutines run on the fleet's event loop, but `generate` and `abort` may be awaited on any loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RunningEngine
from slime.rollout.engines.kind import DECODE
from slime.rollout.engines.pairs import Pair
from slime.rollout.engines.streams import StreamedAnswers, never_sent
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.router import Withdrawn
from slime.rollout.fleet.watched import FleetOptions, WatchedEngines
from slime.types.errors import DeadlineExceeded, EngineError, SlimeError, counted

if TYPE_CHECKING:
    from slime.rollout.fleet.router_address import RouterAddress

log = logging.getLogger(__name__)
T = TypeVar("T")
OnOutput: TypeAlias = Callable[[dict[str, Any]], None]

# The finish reasons of requests that continue from the tokens that they have: those that a weight update ended, and
# those whose engine was lost.
INTERRUPTED, LOST = GOES_ON = ("interrupted", "lost")
INTERRUPT_AGAIN_SECONDS = 1.0
# Attempts of pairs of engines that live to hand a request over.
HANDOVERS = 3


class Fleet(WatchedEngines):
    """The engines of a rollout service. address: where the router answers over HTTP; None where it does not."""

    def __init__(self, engines: Sequence[RunningEngine], loop: LoopThread, options: FleetOptions | None = None) -> None:
        super().__init__(engines, loop, options)
        # The engine of each request in flight, by request id.
        self._sent: dict[str, Member] = {}
        self._pairs: set[PairInFlight] = set()
        self._interrupting = False
        # Members whose requests are being moved to other engines.
        self._leaving: set[Member] = set()
        self.address: RouterAddress | None = None

    async def _close(self) -> None:
        if self.address is not None:
            await self.address.stop()
        await super()._close()

    @contextlib.asynccontextmanager
    async def admit(self, request: RoutedRequest) -> AsyncIterator[Member]:
        """Yields the member of a request, at which `abort` finds it while the block runs. Raises as `Router.admit`."""
        of_router = request.samples, request.session_id, request.member, request.rids
        async with self.router.admit(*of_router) as chosen:
            self._sent.update(dict.fromkeys(request.rids, chosen))
            try:
                yield chosen
            finally:
                for rid in request.rids:
                    self._sent.pop(rid, None)

    async def attempt(
        self, request: RoutedRequest, chosen: Member, send: Callable[[PairInFlight | None], Awaitable[T]]
    ) -> T | None:
        """Returns what `send` returns for a request that `chosen` has admitted. send(pair): pair is None where `chosen`
        does all of the request itself.

        Returns None where the request has to be admitted again: an engine was lost or ends its requests, or its pair
        has failed to hand it over, for which it is sent a few times. Raises Withdrawn where it was aborted, and what
        `explain` raises.
        """
        if chosen.stage == DECODE and not self.router.has_helper:
            return None
        engine = chosen.engine
        with self._paired(request, chosen) as pair:
            try:
                return await send(pair)
            except EngineError as error:
                if pair is None:
                    await self.explain(chosen, engine, error)
                elif pair.aborted:
                    raise Withdrawn from error
                elif self._ended_for(chosen, pair) is None:
                    await self._explain_pair(request, pair, engine, error)
                    if pair.aborted:  # meanwhile
                        raise Withdrawn from error
                return None

    async def _explain_pair(
        self, request: RoutedRequest, pair: PairInFlight, engine: RunningEngine, error: EngineError
    ) -> None:
        """Does what `explain` does, for the engine that is to blame. Where the pair has failed to hand a request over
        and no engine is lost, returns a few times before it raises."""
        blamed = (pair.helper, pair.engine) if pair.helper_failed else (pair.member, engine)
        try:
            await self.explain(*blamed, error)
        except EngineError:
            request.failures += 1
            if self.error is not None or request.failures >= HANDOVERS:
                raise
            log.warning("a request was not handed over, and is sent again: %s", error.message)

    @contextlib.contextmanager
    def _paired(self, request: RoutedRequest, member: Member) -> Iterator[PairInFlight | None]:
        """Yields the pair for a request that `member` has admitted; None where it does all of the request itself. Where
        it does not, the router must have a helper."""
        if member.stage != DECODE:
            yield None
            return
        helper = self.router.take_helper(request.samples, request.session_id)
        pair = PairInFlight(helper, member, request.rids, partial(self.router.give_back, helper, request.samples))
        self._pairs.add(pair)
        try:
            yield pair
        finally:
            self._pairs.discard(pair)
            pair.end_prefill()

    def _ended_for(self, chosen: Member, pair: PairInFlight | None) -> str | None:
        """Returns the finish reason of requests that the fleet ends there now; None while it ends none."""
        if self._interrupting:
            return INTERRUPTED
        return LOST if chosen in self._leaving or (pair is not None and pair.helper in self._leaving) else None

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

        images: data URIs of each sequence, which holds one placeholder token per image. session_id: requests of one
        session go to the same engine. member: the engine to use, in place of the router's choice. on_output: called on
        the fleet's loop with each partial answer; the request must then be of a single sequence.

        Where a finish reason is one of `GOES_ON`, the caller has to send a request for the rest.

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
        fields: dict[str, Any] = {"rid": rids, "return_logprob": True}
        if session_id:
            fields["headers"] = {"X-SMG-Routing-Key": session_id}
        if any(images or ()):
            fields["image_data"] = images
        if self.options.routed_experts:
            fields["return_routed_experts"] = True
        request = _Request(
            samples=len(input_ids), rids=rids or (), session_id=session_id, member=member, input_ids=input_ids,
            sampling_params=sampling_params, fields=fields, on_output=on_output,
        )  # fmt: skip
        outputs: Any = None
        try:
            while outputs is None:
                async with self.admit(request) as chosen:
                    outputs = await self._ask(chosen, request)
        except Withdrawn:
            return request.never_sent()
        if not isinstance(outputs, list) or len(outputs) != len(input_ids):
            count = len(outputs) if isinstance(outputs, list) else 1
            raise EngineError(
                f"engine {chosen.name} answered {counted(count, 'sequence')} to a request of {len(input_ids)}",
                field=chosen.name,
                value=count,
            )
        return outputs

    async def _ask(self, chosen: Member, request: _Request) -> Any:
        """Sends a request to the member that has admitted it, and to a helper where it needs one. Returns the answers;
        None where an engine was lost before it had answered, so that the request is to be admitted again."""
        ids, limit = request.input_ids, chosen.limit
        began = 0 if limit is None else limit.began(_most_tokens(ids, request.sampling_params))
        streamed, params, streaming = self._stream(chosen, request.sampling_params, request.on_output)
        fields = {**request.fields, **self._nuclei(chosen, request.sampling_params)}

        async def send(pair: PairInFlight | None) -> Any:
            generate = partial(chosen.client.generate, ids, params, streamed=streamed, **fields, **streaming)
            if pair is None:
                outputs = await chosen.until_left(generate())
            else:
                # A room serves one attempt.
                once = {"repeatable": False, **pair.fields}
                first = pair.prefill.generate(ids, request.sampling_params, **fields, **once)
                _, outputs = await pair.answers(pair.until_prefilled(first), chosen.until_left(generate(**once)))
            if limit is not None:
                limit.answered(len(ids), _retracted(outputs), began)
            if (reason := self._ended_for(chosen, pair)) is not None:
                _mark_aborted(outputs, reason)
            return outputs

        try:
            outputs, reason = await self.attempt(request, chosen, send), LOST
        except Withdrawn:
            outputs, reason = None, "abort"
        if outputs is None and streamed is not None and streamed.begun:
            return streamed.kept(request.rids, reason)
        return request.never_sent() if reason == "abort" else outputs

    def _nuclei(self, member: Member, sampling_params: list[dict[str, Any]]) -> Mapping[str, Any]:
        """Returns the fields of a request that ask for nuclei."""
        bounded = all(params.get("top_k", -1) > 0 for params in sampling_params)
        asks = self.options.nuclei and (bounded or not member.kind.nuclei_need_top_k)
        return member.kind.nuclei if asks else {}

    def _stream(
        self, member: Member, sampling_params: list[dict[str, Any]], on_output: OnOutput | None
    ) -> tuple[StreamedAnswers | None, list[dict[str, Any]], Mapping[str, Any]]:
        """Returns the collector of a streamed request, None if it is not streamed; its sampling parameters and further
        fields."""
        interval = self.options.stream_interval
        if interval is None:
            interval = member.kind.stream_interval if member.abilities.increments else 0
        if not interval and on_output is None:
            return None, sampling_params, {}
        if on_output is None:
            sampling_params = [params | {"stream_interval": interval} for params in sampling_params]
        fields = member.kind.increments if member.abilities.increments else {}
        return StreamedAnswers(len(sampling_params), on_output), sampling_params, fields

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """Ends the requests with these ids early, or all requests. Their answers have the finish reason "abort"."""
        await self.loop.bridge(self._abort(rids))

    async def _abort(self, rids: Sequence[str] | None) -> None:
        self.router.withdraw(rids)
        helped = self._abort_pairs(rids)
        if rids is None:
            await self.each(lambda member: member.client.abort())
            return
        sent = {(self._sent[rid], rid) for rid in rids if rid in self._sent} | helped
        await asyncio.gather(*(self.call(member, partial(_abort_request, rid)) for member, rid in sent))

    def _abort_pairs(self, rids: Sequence[str] | None) -> set[tuple[Member, str]]:
        """Notes an abort of these requests, or of all, at their pairs. Returns (helper, id) of those in prefill."""
        wanted = None if rids is None else frozenset(rids)
        found = {pair for pair in self._pairs if wanted is None or wanted & set(pair.rids)}
        for pair in found:
            pair.aborted = True
        in_prefill = [pair for pair in found if not pair.prefilled]
        return {(pair.helper, rid) for pair in in_prefill for rid in pair.rids if wanted is None or rid in wanted}

    async def interrupt(self, timeout: float) -> None:
        """Ends all requests in flight; their answers hold the tokens so far and the finish reason `INTERRUPTED`.

        Call it while the router admits nothing. Raises DeadlineExceeded where requests still run after `timeout`
        seconds.
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

    async def move_away(self, member: Member, timeout: float) -> None:
        """Ends the requests of a member that the router has taken out, so that they go on elsewhere with the tokens
        that they have. Returns when it has none left, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._leaving.add(member)
        try:
            while self.router.load_of(member) and not member.left and (left := deadline - time.monotonic()) > 0:
                # By their ids, because the engine may serve others too; repeated, because an abort that overtakes its
                # request finds nothing to end.
                mine = {(member, rid) for rid, sent in self._sent.items() if sent is member}
                for pair in self._pairs:
                    # A request that was handed over is none of its helper's any more.
                    if not pair.prefilled and member in (pair.helper, pair.member):
                        mine |= {(each, rid) for each in (pair.helper, pair.member) for rid in pair.rids}
                with contextlib.suppress(SlimeError):
                    await asyncio.wait_for(asyncio.gather(*(_abort_request(rid, each) for each, rid in mine)), left)
                again = time.monotonic() + min(left, INTERRUPT_AGAIN_SECONDS)
                while self.router.load_of(member) and time.monotonic() < again:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            return
        finally:
            self._leaving.discard(member)


class PairInFlight(Pair):
    """A request at a pair of members. helper: the one that does prefill; engine: its engine when the request began.
    prefilled: whether its part has ended. on_prefilled: called once then."""

    def __init__(self, helper: Member, member: Member, rids: Sequence[str], on_prefilled: Callable[[], None]) -> None:
        super().__init__(helper.client, helper.abilities.bootstrap_port, member.client, rids)
        self.helper, self.member, self.engine = helper, member, helper.engine
        self.prefilled = False
        self._on_prefilled = on_prefilled

    async def until_prefilled(self, prefill: Coroutine[Any, Any, Any]) -> Any:
        """Awaits the helper's call. Raises EngineError as soon as the helper has left the fleet."""
        try:
            return await self.helper.until_left(prefill)
        finally:
            self.end_prefill()

    def end_prefill(self) -> None:
        if not self.prefilled:
            self.prefilled = True
            self._on_prefilled()


@dataclass(kw_only=True)
class RoutedRequest:
    """A request as engines are chosen for it. failures: how often a pair of engines that live has failed to hand it
    over."""

    samples: int
    rids: Sequence[str]
    session_id: str | None
    member: Member | None = None
    failures: int = 0


@dataclass(kw_only=True)
class _Request(RoutedRequest):
    """One request of several sequences. fields: those of its body besides."""

    input_ids: list[list[int]]
    sampling_params: list[dict[str, Any]]
    fields: Mapping[str, Any]
    on_output: OnOutput | None

    def never_sent(self) -> list[dict[str, Any]]:
        """Returns the answers to a request that was aborted before an engine had begun it."""
        return [never_sent(rid) for rid in self.rids or [""] * len(self.input_ids)]


def _most_tokens(input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> int:
    """Returns the tokens of the longest sequence, as long as its response may get."""
    pairs = zip(input_ids, sampling_params, strict=True)
    return max(len(ids) + int(params.get("max_new_tokens") or 0) for ids, params in pairs)


def _retracted(outputs: Any) -> int:
    """Returns how many of these sequences the engine has retracted because its cache was full."""
    metas = [output.get("meta_info") or {} for output in outputs] if isinstance(outputs, list) else []
    return sum(bool(meta.get("num_retractions")) for meta in metas)


async def _abort_request(rid: str, member: Member) -> None:
    await member.client.abort(rid)


def _mark_aborted(outputs: Any, reason: str) -> None:
    for output in outputs if isinstance(outputs, list) else ():
        meta = output.get("meta_info") or {}
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            # Engines may leave this out for a request that they had not begun.
            meta.setdefault("output_token_logprobs", [])
            meta["finish_reason"] = {"type": reason}
