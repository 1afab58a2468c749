"""The process that grades answers: JSON lines {"response", "label"} in, {"reward"} out; ends with its input.

A child, forked when everything is imported and warm, answers the questions. If it uses up its CPU time or its memory,
it is killed, the reward is null, and the next question gets another child within milliseconds.

    python -m slime.rollout.rewards.built_in.math.worker CPU_SECONDS NICENESS
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys
from typing import BinaryIO

MEMORY_BYTES = 2 << 30
# Slow first-time work is done before the first child is forked.
WARM_UP = [
    (r"\boxed{\frac{1}{2}}", "0.5"), (r"\boxed{(1,2]}", "[1,2]"), (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    (r"\boxed{x=5}", "6"), (r"\boxed{x^2-1}", "(x-1)(x+1)"), (r"\boxed{\sqrt{2}}", r"\sqrt{3}"),
    ("so it is $41$", "42"), (r"\boxed{1000}", "1e3"), (r"\boxed{2\pi}", r"\pi \cdot 2"),
    (r"\boxed{[0,\infty)}", r"x \ge 0"),
]  # fmt: skip


def grade(response: str, label: str) -> float:
    from slime.rollout.rewards.built_in.math.answers import equal

    try:
        return float(equal(response, label))
    except Exception:
        # sympy raises any exception for nonsense, including MemoryError and RecursionError.
        return 0.0


def main(cpu_seconds: float, niceness: int) -> None:
    # Ctrl-C is handled by the service, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever a library prints must not mix with the answers, nor fill the log with the answers of a model.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    os.nice(niceness)
    try:
        import math_verify  # noqa: F401
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    for response, label in WARM_UP:
        grade(response, label)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    child = None
    for line in sys.stdin.buffer:
        child = child or Child(cpu_seconds)
        reward = child.ask(line)
        if reward is None:
            child = None
        print(json.dumps({"reward": reward}), file=answers, flush=True)


class Child:
    def __init__(self, cpu_seconds: float) -> None:
        parent_end, child_end = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            parent_end.close()
            _answer(child_end.makefile("rb"), child_end.makefile("wb"), cpu_seconds)
        child_end.close()
        self._requests, self._replies = parent_end.makefile("wb"), parent_end.makefile("rb")
        parent_end.close()

    def ask(self, line: bytes) -> float | None:
        """Returns the reward; None if the child ended without an answer."""
        try:
            self._requests.write(line)
            self._requests.flush()
            reply = self._replies.readline()
        except OSError:
            reply = b""
        if reply:
            return float(reply)
        self._requests.close()
        self._replies.close()
        os.waitpid(self._pid, 0)
        return None


def _answer(requests: BinaryIO, replies: BinaryIO, cpu_seconds: float) -> None:
    """Answers questions in the child, and ends the process."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(silence, descriptor)
        with contextlib.suppress(ValueError, OSError):  # where the system has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # Its default action ends the process, also in the middle of one long operation in C.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        for line in requests:
            question = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            reward = grade(question["response"], question["label"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            replies.write(f"{reward}\n".encode())
            replies.flush()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
