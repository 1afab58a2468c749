"""An asyncio loop in a thread: requests and rewards run there, while gRPC and rollout functions stay synchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime.rollout.calls.call import CALL

T = TypeVar("T")

# Time in which a loop answers, unless a plug-in occupies it.
OCCUPIED_SECONDS = 2.0


class LoopThread:
    def __init__(self, name: str = "slime-rollout-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A plug-in raised it. Its task holds it now, as it would any other exception; the others go on.
                continue
            return

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs a coroutine on the loop and waits for its result; for other threads than the loop's.

        timeout: in seconds. The coroutine is cancelled with the rollout call that it belongs to. Raises RuntimeError on
        the loop's own thread, which would wait for itself, and in place of a SystemExit of the coroutine, which would
        end nothing but the caller's thread.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a rollout function was called on the rollout loop; await its async form instead")
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        call = CALL.get()
        if call is not None:
            call.attach(future)
        try:
            return future.result(timeout)
        except (SystemExit, KeyboardInterrupt) as error:
            if future.cancel() or future.cancelled() or future.exception() is not error:
                raise
            raise RuntimeError(f"a plug-in raised {error!r}").with_traceback(error.__traceback__) from error
        except BaseException:
            future.cancel()
            raise

    async def bridge(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on this loop and awaits it on the caller's, because plug-ins may run a loop of their own."""
        if asyncio.get_running_loop() is self.loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def is_occupied(self) -> bool:
        """Returns whether a plug-in, such as a reward function with an endless loop, keeps everything else from
        running."""
        answer = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.loop)
        try:
            answer.result(OCCUPIED_SECONDS)
        except TimeoutError:
            answer.cancel()
            return True
        return False

    def stop(self) -> None:
        """Cancels what runs, and ends the thread. One whose loop is occupied ends with the process."""
        if not self._thread.is_alive() or self.is_occupied():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
