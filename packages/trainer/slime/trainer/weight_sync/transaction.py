"""begin, transfer, commit; or abort with the reason."""

from __future__ import annotations

import logging
from typing import Protocol

from slime.trainer.weight_sync.base import Weights, WeightTransport
from slime.types.clients import Engine
from slime.types.errors import SlimeError

log = logging.getLogger(__name__)


class Engines(Protocol):
    """What is called of `slime.types.clients.RolloutClient`."""

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]: ...

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None: ...

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None: ...


def push(rollout: Engines, transport: WeightTransport, version: int, weights: Weights, timeout_seconds: float) -> int:
    """Pushes one version to the engines of a rollout service; bytes sent. A failure aborts the update and is raised."""
    engines = rollout.begin_weight_update(version, timeout=timeout_seconds)
    try:
        sent = transport.send(engines, version, weights)
        rollout.commit_weight_update(version, timeout=timeout_seconds)
    except BaseException as failure:
        try:
            rollout.abort_weight_update(version, f"{type(failure).__name__}: {failure}", timeout=timeout_seconds)
        except SlimeError as second:
            # The first failure is the one to report; without a commit no engine serves either way.
            log.error("weight update %d could not be aborted: %s", version, second)
        raise
    return sent
