"""1 where the response's answer equals the label mathematically, by math-verify; see `answers`.

A comparison takes milliseconds or, for `9^{9^{9}}`, for ever. So answers are graded by processes, about one for each
core. A comparison of more than `QUICK_SECONDS` of CPU time moves to other processes, of lower priority, which give up
after `SLOW_SECONDS`: hopeless answers do not delay others. The processes end with this one.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.rollout.children.environment import child_environment
from slime.rollout.children.pipes import read_json_line
from slime.types import Sample
from slime.types.errors import EngineError, counted

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
QUICK_SECONDS, SLOW_SECONDS = 0.5, 2.0
# A limit in wall-clock time, for a machine too busy to answer.
ANSWER_SECONDS = 60.0
MOST_WORKERS = 16
SECONDS_BETWEEN_WARNINGS = 60.0


async def reward(args: object, sample: Sample) -> float:
    label = str(sample.label)
    for pool in (_quick(), _slow()):
        answer = await asyncio.get_running_loop().run_in_executor(pool.threads, pool.score, sample.response, label)
        if answer is not None:
            return answer
    return _given_up(sample.response)


def equal(response: str, label: str) -> float:
    """Returns 1.0 or 0.0; 0.0 also for a comparison that does not end in time."""
    for pool in (_quick(), _slow()):
        answer = pool.score(response, label)
        if answer is not None:
            return answer
    return _given_up(response)


@functools.cache
def _quick() -> MathPool:
    return MathPool(QUICK_SECONDS, niceness=0)


@functools.cache
def _slow() -> MathPool:
    return MathPool(SLOW_SECONDS, niceness=10)


class _GivenUp:
    """Counts answers that were given up, and logs their number at most once in `SECONDS_BETWEEN_WARNINGS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._next = 0.0

    def add(self, response: str) -> None:
        with self._lock:
            self._count += 1
            if time.monotonic() < self._next:
                return
            count, self._count, self._next = self._count, 0, time.monotonic() + SECONDS_BETWEEN_WARNINGS
        logger.warning(
            "--rm-type math: %s could not be compared within %g s of CPU time or the memory limit and got a reward of "
            "0. The last one ends with %r",
            counted(count, "answer"), SLOW_SECONDS, response[-80:],
        )  # fmt: skip


_given_up_answers = _GivenUp()


def _given_up(response: str) -> float:
    _given_up_answers.add(response)
    return 0.0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class MathPool:
    """A pool of worker processes, each started when it is first needed. Thread-safe."""

    def __init__(self, cpu_seconds: float, *, niceness: int, size: int | None = None) -> None:
        size = size or min(MOST_WORKERS, max(2, _cores()))
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="math-reward")
        self._idle: queue.LifoQueue[MathWorker] = queue.LifoQueue()
        self._workers = [MathWorker(cpu_seconds, niceness) for _ in range(size)]
        for worker in reversed(self._workers):
            self._idle.put(worker)
        atexit.register(self.stop)

    def score(self, response: str, label: str) -> float | None:
        """Returns the reward; None if the comparison used up its time or memory."""
        worker = self._idle.get()
        try:
            return worker.score(response, label)
        finally:
            self._idle.put(worker)

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()


class MathWorker:
    """A worker process, which makes one comparison at a time."""

    def __init__(self, cpu_seconds: float, niceness: int) -> None:
        self._arguments = [str(cpu_seconds), str(niceness)]
        self._process: subprocess.Popen[bytes] | None = None

    def score(self, response: str, label: str) -> float | None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._ask({"response": response, "label": label}, ANSWER_SECONDS)
        if answer is None:
            self.stop()
            return None
        return answer["reward"]

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None

    def _start(self) -> None:
        self.stop()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime.rollout.rewards.built_in.math.worker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=child_environment({"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}),
        )
        ready = self._read(START_SECONDS)
        if ready is None or "error" in ready:
            self.stop()
            reason = "no answer" if ready is None else ready["error"]
            raise EngineError(
                f"--rm-type math: the process that runs math-verify did not start: {reason}",
                field="--rm-type", value="math",
            )  # fmt: skip

    def _ask(self, question: dict[str, str], seconds: float) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(seconds)

    def _read(self, seconds: float) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        return read_json_line(self._process.stdout.fileno(), time.monotonic() + seconds) or None
