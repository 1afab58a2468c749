"""A weight update as a transaction: begin, transfer, commit; or abort with the reason."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slime.trainer.process.collective import Ranks
from slime.types.clients import Engine
from slime.types.errors import SlimeError

log = logging.getLogger(__name__)


class Engines(Protocol):
    """The methods of `slime.types.clients.RolloutClient` that rank 0 calls."""

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]: ...

    def begin_joining(self, weight_version: int, timeout: float | None = None) -> list[Engine]: ...

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None: ...

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None: ...

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None: ...


def push(
    rollout: Engines,
    ranks: Ranks,
    version: int,
    send: Callable[[list[Engine]], int],
    timeout_seconds: float,
    release: Callable[[], None] = lambda: None,
    *,
    joining: bool = False,
) -> int:
    """Pushes a version to the engines of a rollout service; collective, returns the result of `send`.

    send(engines) transfers the weights and fails on all ranks if it fails on one. release() gives this rank's memory to
    the engines, before they take back what they need to serve. joining: only to engines that were started again and
    wait for weights; returns 0 where there are none. A failure aborts the update and is raised.
    """

    def begin() -> list[dict[str, Any]]:
        begin = rollout.begin_joining if joining else rollout.begin_weight_update
        return [dataclasses.asdict(engine) for engine in begin(version, timeout=timeout_seconds)]

    members = ranks.from_first(begin)
    if joining and not members:
        ranks.together(release)
        return 0
    try:
        sent = send([Engine(**member) for member in members])
        ranks.together(release)
        ranks.from_first(lambda: _finish(rollout, version, timeout_seconds))
    except BaseException as failure:
        if ranks.rank == 0:
            _abort(rollout, version, f"{type(failure).__name__}: {failure}", timeout_seconds)
        raise
    return sent


def _finish(rollout: Engines, version: int, timeout_seconds: float) -> None:
    # Engines that released their memory have got back only the memory of the weights; for others this does nothing.
    rollout.onload(timeout=timeout_seconds)
    rollout.commit_weight_update(version, timeout=timeout_seconds)


def _abort(rollout: Engines, version: int, reason: str, timeout_seconds: float) -> None:
    try:
        rollout.abort_weight_update(version, reason, timeout=timeout_seconds)
    except SlimeError as second:
        # The first failure is the one to report; without a commit no engine serves either way.
        log.error("weight update %d could not be aborted: %s", version, second)
