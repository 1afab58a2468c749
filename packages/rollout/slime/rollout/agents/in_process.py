"""Runs agents inside the rollout service: the function of `--custom-agent-path`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import logging
import math
import numbers
import threading
from collections.abc import Callable, Mapping
from typing import Any

from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, RemoteError, SlimeError
from slime.types.plugin_contracts import accepted

log = logging.getLogger(__name__)

# Seconds that a cancelled agent has to end. After that its thread is interrupted, again and again at this interval.
END_SECONDS = 5.0
# The most threads that may hang in system calls without a timeout, which nothing can interrupt.
MOST_HANGING = 64
_hanging: set[threading.Thread] = set()


class AgentInterrupted(BaseException):
    """Raised in the thread of an agent that keeps running after its episode; `except Exception` does not catch it."""


class InProcessAgent:
    """An agent in this process. Each episode runs in a thread with its own event loop, so that a blocking call delays
    nothing else, in particular not the gateway whose answer it waits for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def play(self, base_url: str, sample: Sample, keywords: Mapping[str, Any]) -> Any:
        """Plays an episode; returns its reward, or None if the agent leaves the reward to the run.

        keywords: optional arguments; the function gets those that it accepts. Raises RemoteError if the agent raises,
        InvalidField if the answer is not a reward, InvalidSetting if the threads of too many earlier episodes hang.
        """
        _hanging.intersection_update(threading.enumerate())
        if len(_hanging) >= MOST_HANGING:
            raise InvalidSetting(
                f"--custom-agent-path: {MOST_HANGING} episodes were ended, and the agent still hangs in system calls "
                "that nothing can interrupt; give its calls a timeout",
                field="--custom-agent-path", value=MOST_HANGING,
            )  # fmt: skip
        taken = accepted(self._function, dict(keywords))
        episode = _Episode(lambda: self._function(base_url, sample, **taken))
        try:
            answer = await episode.run()
        except SlimeError:
            raise
        except Exception as error:
            log.warning("the agent failed on sample %s", sample.index, exc_info=error)
            raise RemoteError(
                f"the agent raised {type(error).__name__}: {error}", field="--custom-agent-path"
            ) from error
        return reward_of(answer)


class _Episode:
    """One call of the agent in a thread of its own, which is cancelled with the episode."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._thread: threading.Thread | None = None
        self._is_over = False

    async def run(self) -> Any:
        waiting = asyncio.get_running_loop()
        done: asyncio.Future[Any] = waiting.create_future()

        def work() -> None:
            try:
                result, error = asyncio.run(self._main()), None
            except BaseException as raised:
                result, error = None, raised
            with contextlib.suppress(RuntimeError):
                waiting.call_soon_threadsafe(_settle, done, result, error)

        self._thread = threading.Thread(target=work, name="slime-agent", daemon=True)
        self._thread.start()
        try:
            return await done
        finally:
            self._cancel()
            if done.cancelled():
                waiting.call_later(END_SECONDS, self._interrupt, waiting)

    async def _main(self) -> Any:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._is_over:
            # The episode was cancelled before the task existed.
            raise asyncio.CancelledError
        answer = self._call()
        return await answer if inspect.isawaitable(answer) else answer

    def _cancel(self) -> None:
        self._is_over = True
        if self._loop is not None and self._task is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)

    def _interrupt(self, waiting: asyncio.AbstractEventLoop) -> None:
        """Raises AgentInterrupted in the thread as soon as that executes Python code again."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        if thread not in _hanging:
            _hanging.add(thread)
            log.warning("the agent still runs %g s after its episode was ended, and is interrupted", END_SECONDS)
        # This also wakes an event loop that waits.
        self._cancel()
        # Checked again, because another thread may get the identifier of one that has ended.
        if thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(AgentInterrupted)
            )
        # The thread may be inside a system call, or may swallow the exception.
        waiting.call_later(END_SECONDS, self._interrupt, waiting)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    elif isinstance(error, Exception):
        done.set_exception(error)
    else:
        done.set_exception(RuntimeError(f"the agent ended with {type(error).__name__}"))


def reward_of(answer: Any) -> Any:
    """Returns an agent's answer if it is a reward: a finite number, a dict, or None. Raises InvalidField otherwise."""
    if answer is None or isinstance(answer, dict):
        return answer
    if isinstance(answer, numbers.Real) and math.isfinite(answer):
        return float(answer)
    raise InvalidField("reward", answer, "a finite number, a dict of rewards (--reward-key), or None")
