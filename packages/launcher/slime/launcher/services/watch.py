"""Finds services of this node that died, were stopped by a signal, or do not answer their health check."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

from slime.types.clients.base import Client
from slime.types.rpc import RpcSettings
from slime.v1 import buffer_pb2_grpc

LOOK_SECONDS = 0.2
# Seconds between two health checks of a service.
PROBE_SECONDS = 2.0
# Seconds between two looks at the processes that a service has started.
FAMILY_SECONDS = 10.0
# A process that stays stopped for so many seconds counts as lost.
STOPPED_SECONDS = 0.5
KILL_SECONDS = 10.0


class WatchedProcess:
    """A service's process, and those that it started, which must not outlive it. Call `look` now and then."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)
        self._family: list[psutil.Process] = []
        self._looked = 0.0
        self._stopped_since: float | None = None

    def look(self) -> str | None:
        """Returns the fault of the process, "died" or "was stopped by a signal", or None."""
        try:
            state = self.process.status() if self.process.is_running() else psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            state = psutil.STATUS_ZOMBIE
        now = time.monotonic()
        if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "died"
        if state == psutil.STATUS_STOPPED:
            self._stopped_since = self._stopped_since or now
            return "was stopped by a signal" if now - self._stopped_since >= STOPPED_SECONDS else None
        self._stopped_since = None
        if now - self._looked >= FAMILY_SECONDS:
            self._looked = now
            self._note_family()
        return None

    def _note_family(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._family = self.process.children(recursive=True)

    def kill(self) -> None:
        """Kills the process and those that it has started, even if these have sessions of their own."""
        if self.look() != "died":  # the children of a dead process have another parent
            # Suspended, so that it starts no more processes while they are listed.
            with suppress(psutil.NoSuchProcess):
                self.process.suspend()
            self._note_family()
        each = [self.process, *self._family]
        for process in each:
            # psutil compares start times, so a process that has got the same pid since is left alone.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(each, timeout=KILL_SECONDS)


class HealthProbe:
    """Checks the health of one service in a thread. `silent`: the service has missed two checks in a row.

    seconds: time without an answer after which the service counts as hanging.
    """

    def __init__(self, address: str, settings: RpcSettings, seconds: float) -> None:
        self.silent = False
        self._seconds = seconds
        # Health is the same for every service, so any client can ask.
        self._client = _HealthClient(address, settings=dataclasses.replace(settings, retry_seconds=0.0))
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name=f"health-{address}", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def _ask(self) -> None:
        answered, misses = time.monotonic(), 0
        while not self._ended.wait(PROBE_SECONDS):
            if self._client.is_serving(self._seconds / 2):
                answered, misses = time.monotonic(), 0
                continue
            # Two, because this process itself may have been stopped during one.
            misses += 1
            self.silent = misses >= 2 and time.monotonic() - answered >= self._seconds
        self._client.close()


class _HealthClient(Client):
    stub = buffer_pb2_grpc.BufferServiceStub


def kill_all(processes: Iterable[WatchedProcess]) -> None:
    """Kills processes at the same time, because the ranks of a trainer wait for each other."""
    threads = [threading.Thread(target=process.kill) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
