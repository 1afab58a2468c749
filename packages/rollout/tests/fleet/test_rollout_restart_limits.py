"""Limits on how often a lost engine is started again."""

from __future__ import annotations

import time
from typing import Any

import pytest

from slime.rollout.fleet.restarts import RestartLimits, Restarts
from slime.rollout.generate import state
from slime.rollout.generate.state import restart_limits
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import EngineError, InvalidSetting, NotAvailable


def test_tries_after_one_loss_are_bounded_however_long_each_takes() -> None:
    # Each takes longer than the window, as one does that ends by --rollout-engine-start-seconds.
    restarts, lost = Restarts(RestartLimits(most=2, window_seconds=1e-9)), time.monotonic()
    restarts.check("engine-0", "it died", lost)
    restarts.check("engine-0", "it was not ready", lost)
    with pytest.raises(EngineError, match="started again 2 times.*it was not ready"):
        restarts.check("engine-0", "it was not ready", lost)
    restarts.check("engine-0", "it died", time.monotonic())


def test_engines_are_started_again_where_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(**values: Any) -> RestartLimits | None:
        return restart_limits(RolloutSettings(hf_checkpoint="none", **values))

    monkeypatch.setattr(state, "visible_gpus", list)
    assert limits(rollout_engine_max_restarts=3) == RestartLimits(most=3, window_seconds=600, start_seconds=1800)
    assert limits(colocate=True) is not None
    assert limits(use_fault_tolerance=False) is None
    assert limits(rollout_external_engine_addrs=["10.0.0.1:30000"]) is None
    with pytest.raises(InvalidSetting, match="--use-fault-tolerance.*--rollout-external-engine-addrs"):
        limits(use_fault_tolerance=True, rollout_external_engine_addrs=["10.0.0.1:30000"])

    monkeypatch.setattr(state, "visible_gpus", lambda: ["0"])
    assert limits(use_fault_tolerance=True) is not None
    assert limits(colocate=True) is None
    with pytest.raises(NotAvailable, match="--use-fault-tolerance.*offloaded"):
        limits(use_fault_tolerance=True, colocate=True)
