"""Polls the load of one engine, and lets its limit of samples in flight follow it."""

from __future__ import annotations

import asyncio
import logging

from slime.rollout.fleet.concurrency import EngineLoad
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.router import Router
from slime.types.errors import InvalidField, SlimeError

log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
# With many engines the polls of all of them together take at most this many calls a second.
POLLS_PER_SECOND = 200
TIMEOUT_SECONDS = 5.0


async def follow_load(member: Member, router: Router[Member]) -> None:
    """Feeds the engine's load figures to `member.limit` until it is cancelled, or the engine turns out to report none:
    then the limit is fixed again. An engine that is idle or paused is not polled."""
    while member.limit is not None and not member.left:
        await asyncio.sleep(max(POLL_SECONDS, len(router.engines) / POLLS_PER_SECOND))
        if not _generates(member, router):
            continue
        try:
            load = EngineLoad.from_answer(await member.client.loads(TIMEOUT_SECONDS))
        except InvalidField as error:
            member.limit = None
            log.warning(
                "engine %s does not report its load, so its limit of samples in flight is fixed at %d: %s",
                member.name, router.limit_of(member), error,
            )  # fmt: skip
        except SlimeError as error:
            # Health probes find out whether the engine is lost.
            log.debug("engine %s did not report its load: %s", member.name, error)
        else:
            if _generates(member, router):
                member.limit.observe(load, router.load_of(member), router.take_held_back(member))
        router.refill()


def _generates(member: Member, router: Router[Member]) -> bool:
    return not (member.out or member.held or router.is_shut) and router.load_of(member) > 0
