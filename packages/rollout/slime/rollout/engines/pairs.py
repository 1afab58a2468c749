"""A request at a pair of engines: one does prefill, and hands the keys and values over to the one that decodes.

As SGLang (0.5.17) has it, both get the same request, with three more fields: `bootstrap_host` and `bootstrap_port`,
where the first one listens for the second, and `bootstrap_room`, a number by which they find the request, other than 0.
Of a request for several samples, sample i has the room i after it. The second one answers; the first one's answer has
the log-probs of the prompt. A request that is aborted before it is handed over is answered with a server error.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slime.rollout.engines.client import EngineClient
from slime.types.errors import DeadlineExceeded, EngineError, SlimeError

T = TypeVar("T")

# Below the largest room, less those of the further samples of a request.
ROOMS = 1 << 62
# Seconds within which the death of one engine shows in its connections, after the other's request has failed.
BLAME_SECONDS = 2.0
ABORT_SECONDS = 5.0


class Pair:
    """One request at an engine that does prefill and one that decodes.

    fields: what the request has besides, at both. aborted: whether an abort was sent for it. helper_failed: whether the
    engine that does prefill is to blame for the error of `answers`.
    """

    def __init__(
        self, prefill: EngineClient, bootstrap_port: int | None, decode: EngineClient, rids: Sequence[str]
    ) -> None:
        self.prefill, self.decode, self.rids = prefill, decode, rids
        host = urlsplit(prefill.url).hostname or ""
        self.fields: Mapping[str, Any] = {
            "bootstrap_host": f"[{host}]" if ":" in host else host,
            "bootstrap_port": bootstrap_port,
            "bootstrap_room": random.randrange(1, ROOMS),
        }
        self.aborted = False
        self.helper_failed = False

    async def answers(self, prefill: Coroutine[Any, Any, Any], decode: Coroutine[Any, Any, T]) -> tuple[Any, T]:
        """Awaits both calls of the request. If one fails, ends the other, and raises the error of the engine that is to
        blame: the one whose connection broke, if there is one. An engine that refuses the request is to blame at
        once: nothing is handed over then."""
        first, second = asyncio.ensure_future(prefill), asyncio.ensure_future(decode)
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_EXCEPTION)
            errors = [_error(first), _error(second)]
            failed = any(isinstance(error, EngineError | DeadlineExceeded) for error in errors)
            if failed and not any(map(_is_gone, errors)) and not self.aborted:
                await asyncio.wait({first, second}, timeout=BLAME_SECONDS)
                errors = [_error(first), _error(second)]
            of_first, of_second = errors
            if of_first is not None and (of_second is None or not _is_gone(of_second)):
                self.helper_failed = True
                raise of_first
            if of_second is not None:
                raise of_second
            return first.result(), second.result()
        except BaseException:
            await self._end(first, second)
            raise

    async def _end(self, *calls: asyncio.Future[Any]) -> None:
        """Ends both calls, and the request at each engine, which would go on without its connection."""
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        aborts = [self._abort(client, rid) for client in (self.prefill, self.decode) for rid in self.rids]
        await asyncio.gather(*aborts)

    async def _abort(self, client: EngineClient, rid: str) -> None:
        if client.closed:  # of an engine that was replaced or has left
            return
        with contextlib.suppress(SlimeError, TimeoutError):
            await asyncio.wait_for(client.abort(rid), ABORT_SECONDS)


def with_prompt_log_probs(answer: Any, of_prefill: Any) -> Any:
    """Returns an answer of the engine that decodes with the log-probs of the prompt, which the other one computed."""
    if isinstance(answer, list) and isinstance(of_prefill, list):
        return [with_prompt_log_probs(*each) for each in zip(answer, of_prefill, strict=False)]
    if not isinstance(answer, dict) or not isinstance(of_prefill, dict):
        return answer
    name = "input_token_logprobs"
    meta, first = answer.get("meta_info") or {}, of_prefill.get("meta_info") or {}
    if name not in meta or name not in first:
        return answer
    return answer | {"meta_info": meta | {name: [*(first[name] or ()), *(meta[name] or ())]}}


def _error(call: asyncio.Future[Any]) -> BaseException | None:
    return call.exception() if call.done() and not call.cancelled() else None


def _is_gone(error: BaseException | None) -> bool:
    return isinstance(error, EngineError) and "is gone" in error.message
