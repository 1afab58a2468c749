"""A fleet whose event loop never comes back from a plug-in: it stops all the same, and soon."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from rollout_fakes import FakeEngine

from slime.rollout.calls import event_loop
from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.watched import FleetOptions


def test_a_plug_in_that_does_not_return_delays_no_stop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "OCCUPIED_SECONDS", 0.2)
    engine, loop, go_on, begun = FakeEngine(), LoopThread(), threading.Event(), threading.Event()
    fleet = Fleet([engine], loop, FleetOptions())
    fleet.start()
    try:
        assert not loop.is_occupied()

        async def reward() -> None:
            begun.set()
            go_on.wait()

        occupied = asyncio.run_coroutine_threadsafe(reward(), loop.loop)
        assert begun.wait(60)
        started = time.monotonic()
        fleet.stop()
        loop.stop()
        # The calls that it makes otherwise have 40 seconds.
        assert time.monotonic() - started < 10 and not occupied.done()
        assert "a plug-in (reward, generate function, ...) does not return" in caplog.text
    finally:
        go_on.set()
        occupied.result(60)
        loop.stop()
        engine.stop()
