"""Limits on how often a lost engine is started again."""

from __future__ import annotations

import time

import pytest

from slime.rollout.fleet.restarts import RestartLimits, Restarts
from slime.types.errors import EngineError


def test_tries_after_one_loss_are_bounded_however_long_each_takes() -> None:
    # Each takes longer than the window, as one does that ends by --rollout-engine-start-seconds.
    restarts, lost = Restarts(RestartLimits(most=2, window_seconds=1e-9)), time.monotonic()
    restarts.check("engine-0", "it died", lost)
    restarts.check("engine-0", "it was not ready", lost)
    with pytest.raises(EngineError, match="started again 2 times.*it was not ready"):
        restarts.check("engine-0", "it was not ready", lost)
    restarts.check("engine-0", "it died", time.monotonic())
