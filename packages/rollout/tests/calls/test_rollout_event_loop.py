"""The loop of rollouts under plug-ins that try to end the process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from slime.rollout.calls.event_loop import LoopThread

DEADLINE = 20


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    started = LoopThread()
    yield started
    started.stop()


@pytest.mark.parametrize("end", [SystemExit(7), KeyboardInterrupt()])
def test_a_plug_in_that_leaves_fails_its_call_alone(loop: LoopThread, end: BaseException) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def reward(leaves: bool) -> int:
        if leaves:
            raise end
        begun.set()
        await go_on.wait()
        return 5

    async def beside() -> None:
        await asyncio.gather(asyncio.sleep(0), reward(True))

    other = asyncio.run_coroutine_threadsafe(reward(False), loop.loop)
    loop.run(begun.wait(), DEADLINE)
    with pytest.raises(RuntimeError, match="a plug-in raised (SystemExit|KeyboardInterrupt)"):
        loop.run(beside(), DEADLINE)
    loop.loop.call_soon_threadsafe(go_on.set)
    assert other.result(DEADLINE) == 5


def test_a_plug_in_that_leaves_in_a_thread_is_an_error(loop: LoopThread) -> None:
    async def reward() -> None:
        await asyncio.to_thread(sys.exit, 3)

    with pytest.raises(RuntimeError, match=r"a plug-in raised SystemExit\(3\)"):
        loop.run(reward(), DEADLINE)
