"""The process of an engine: started in its own session, watched, and ended together with everything it started.

The engine inherits two pipes. It writes one JSON line into the first: `{"port": N}` when it serves, or
`{"error": {...}}` when it refuses to start. This process holds the only write end of the second and never writes to it:
end of file tells the engine that its parent is gone, for whatever reason.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.rollout.children.environment import child_environment
from slime.rollout.children.pipes import read_json_line
from slime.rollout.engines.base import RunningEngine
from slime.rollout.engines.keys import VARIABLE
from slime.types.errors import DeadlineExceeded, EngineError, SlimeError, error_classes

logger = logging.getLogger(__name__)

KEPT_LINES = 50
# The flag by which the program of an engine calls its model: users of a run have never typed it.
MODEL_FLAG = "--model-path"
# An engine that listens on all addresses is called at the loopback address.
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class EngineProcess:
    """An engine that this process started; a `base.RunningEngine`.

    command: returns the argument vector to start, from (announce_fd, parent_fd). grace_seconds: the default time that
    `stop` waits between SIGTERM and SIGKILL. api_key: the key that calls must carry; it is passed in the environment of
    the process, which other users cannot read.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        command: Callable[[int, int], list[str]],
        *,
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 5.0,
        api_key: str | None = None,
    ) -> None:
        self.name = name
        self.api_key = api_key
        self.kind = kind
        self.grace_seconds = grace_seconds
        self._host = host
        self._start_again = functools.partial(
            EngineProcess,
            name, kind, command, host=host, env=env, grace_seconds=grace_seconds, api_key=api_key,
        )  # fmt: skip
        self._port: int | None = None
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._stopping = threading.Lock()
        self._announced: int | None
        self._parent_end: int | None
        self._announced, announce_fd = os.pipe()
        parent_fd, self._parent_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                command(announce_fd, parent_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(announce_fd, parent_fd),
                start_new_session=True,
                env=child_environment({**(env or {}), VARIABLE: api_key or ""}),
            )
        except OSError as error:
            os.close(self._announced)
            os.close(self._parent_end)
            raise EngineError(f"engine {name} cannot be started: {error}") from error
        finally:
            os.close(announce_fd)
            os.close(parent_fd)
        self._reader = threading.Thread(target=self._read_lines, name=f"log-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        if self._port is None:
            raise EngineError(f"engine {self.name} has not announced its port yet")
        host = ANY_ADDRESS.get(self._host, self._host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self._port}"

    @property
    def last_lines(self) -> list[str]:
        """The last lines that the engine printed, oldest first, at most 50."""
        return list(self._lines)

    def wait_ready(self, timeout_seconds: float = 300.0) -> EngineProcess:
        """Returns itself once the engine serves.

        Raises the error with which the engine refused to start (MissingFile, InvalidFile, PortInUse, ...), EngineError
        if it died without an announcement, DeadlineExceeded (and stops the engine) if none came in time.
        """
        if self._port is not None:
            return self
        message = self._read_announcement(time.monotonic() + timeout_seconds)
        if message is None:
            self.stop()
            raise DeadlineExceeded(
                f"engine {self.name} was not ready after {timeout_seconds:g} s; its last lines:\n{self._tail()}",
                field="timeout_seconds",
                value=timeout_seconds,
            )
        if "error" in message:
            self._await_exit(30.0)
            self.stop()
            raise _as_error(message["error"], self.name)
        if "port" not in message:
            self._await_exit(30.0)
            self.stop()
            raise self._death()
        self._port = int(message["port"])
        return self

    def start_again(self) -> EngineProcess:
        """Stops this process and returns a new one with the same name, command and key, which does not serve yet."""
        self.stop(0)
        return self._start_again()

    def poll(self) -> int | None:
        """Returns the exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    def raise_if_dead(self) -> None:
        if self.poll() is not None:
            raise self._death()

    def stop(self, grace_seconds: float | None = None) -> None:
        """Ends the engine's process group with SIGTERM, and with SIGKILL after `grace_seconds`. Safe to call again,
        also from another thread."""
        with self._stopping:
            if self._announced is not None:
                # Only once: after the process is reaped, the system may reuse its id.
                self._stop(grace_seconds)

    def _stop(self, grace_seconds: float | None) -> None:
        self._signal_group(signal.SIGTERM)
        self._await_exit(self.grace_seconds if grace_seconds is None else grace_seconds)
        self._signal_group(signal.SIGKILL)
        self._process.wait(timeout=30)
        self._reader.join(timeout=5)
        for name in ("_announced", "_parent_end"):
            descriptor = getattr(self, name)
            if descriptor is not None:
                os.close(descriptor)
                setattr(self, name, None)

    def kill(self) -> None:
        """Sends SIGKILL to the engine's process group, from any thread; `stop` cleans up."""
        if self._announced is not None:
            self._signal_group(signal.SIGKILL)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _read_lines(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                self._lines.append(line)
                logger.info("[%s] %s", self.name, line)

    def _read_announcement(self, deadline: float) -> dict[str, Any] | None:
        """Returns the announced object, {} if the engine closed the pipe without one, None at the deadline."""
        descriptor = self._announced
        if descriptor is None:  # stopped
            return {}
        return read_json_line(descriptor, deadline)

    def _await_exit(self, timeout_seconds: float) -> None:
        try:
            self._process.wait(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            logger.warning("engine %s has not ended within %g s, and is killed", self.name, timeout_seconds)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return
        except PermissionError:
            # macOS answers so where only processes are left that have ended and were not waited for.
            if self._process.poll() is None:
                raise

    def _tail(self) -> str:
        return "\n".join(f"    {line}" for line in self._lines) or "    (none)"

    def _death(self) -> EngineError:
        code = self.poll()
        # Lines written just before the process ended may still be in the pipe.
        self._reader.join(timeout=5)
        return EngineError(
            f"engine {self.name} (pid {self.pid}) ended with {describe_exit(code)}; its last lines:\n{self._tail()}",
            field=self.name,
            value=str(code),
            expected="a running engine",
        )


def start_all(starts: Iterable[Callable[[], EngineProcess]], timeout_seconds: float) -> list[EngineProcess]:
    """Starts several engines at the same time, and returns them when they are ready. Raises as `wait_ready`; then none
    is left running."""
    deadline = time.monotonic() + timeout_seconds
    processes: list[EngineProcess] = []
    try:
        for start in starts:
            processes.append(start())
        return [process.wait_ready(max(0.0, deadline - time.monotonic())) for process in processes]
    except BaseException:
        stop_all(processes)
        raise


def stop_all(engines: Iterable[RunningEngine], grace_seconds: float | None = None) -> None:
    """Stops several engines at the same time. Raises the first failure after all have been told to stop."""
    engines = list(engines)
    if engines:
        with ThreadPoolExecutor(len(engines), thread_name_prefix="stop") as pool:
            for stopped in [pool.submit(engine.stop, grace_seconds) for engine in engines]:
                stopped.result()


def describe_exit(code: int | None) -> str:
    if code is None:
        return "no exit code"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _as_error(detail: Mapping[str, Any], engine: str) -> SlimeError:
    """Returns the error that the engine announced, with its original class and without the flag of its own program."""
    cls = error_classes().get(detail["type"], EngineError)
    message = detail["message"].replace(MODEL_FLAG, f"the model of engine {engine}")
    return cls.restore(message, field=detail["field"], value=detail["value"], expected=detail["expected"])
