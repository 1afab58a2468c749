"""1 where the response's answer equals the label as mathematics says, by math-verify.

math-verify stops hopeless expressions by signals, which only work in the main thread of a process: so it runs in a
process of its own, which ends with ours and is replaced when it does not answer.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from slime.rollout.child_environment import child_environment
from slime.types import Sample
from slime.types.errors import EngineError

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
# Parsing twice and comparing once have 5 seconds each inside the worker.
ANSWER_SECONDS = 20.0


async def reward(args: Any, sample: Sample) -> float:
    return await asyncio.to_thread(equal, sample.response, str(sample.label))


def equal(response: str, label: str) -> float:
    """1.0 or 0.0; 0.0 too where the comparison does not end."""
    return _worker().score(response, label)


_shared: MathWorker | None = None
_shared_lock = threading.Lock()


def _worker() -> MathWorker:
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = MathWorker()
            atexit.register(_shared.stop)
        return _shared


class MathWorker:
    """One comparison at a time; thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def score(self, response: str, label: str) -> float:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            answer = self._ask({"response": response, "label": label}, ANSWER_SECONDS)
            if answer is None:
                logger.warning(
                    "math-verify did not answer in %g s; the reward is 0: %r", ANSWER_SECONDS, response[:200]
                )
                self._end()
                return 0.0
            return float(answer["reward"])

    def stop(self) -> None:
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime.rollout.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=child_environment({"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}),
        )
        if self._read(START_SECONDS) is None:
            self._end()
            raise EngineError(
                "the math-verify worker did not start; is math-verify installed?", field="--rm-type", value="math"
            )

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
        descriptor = self._process.stdout.fileno()
        deadline, received = time.monotonic() + seconds, b""
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return None
            received += chunk
        return json.loads(received)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
