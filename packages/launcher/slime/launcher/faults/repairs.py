"""Repairs: starts services again that died or hang, and has the calls that failed meanwhile repeated.

whole --a service is lost--> repairing --its kind is started again--> whole
                                 └──too often within a time──> failed: every call raises ServiceDied
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slime.launcher.services.supervisor import ServiceDied
from slime.launcher.services.watch import LOOK_SECONDS
from slime.types.errors import SlimeError, counted

log = logging.getLogger(__name__)

# A connection breaks some time before the death of its peer is noticed.
NOTICE_SECONDS = 2.0
LONGEST_PAUSE = 30.0
# Statuses of errors that may be the consequence of a death that is not known yet.
CONSEQUENCES = ("UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED")


@dataclass(frozen=True)
class RepairLimits:
    """The most restarts of a service within `window_seconds`, or within one repair. pause_seconds: time before a
    service's second start within a repair; each further pause is twice as long, up to LONGEST_PAUSE."""

    most: int = 5
    window_seconds: float = 600.0
    pause_seconds: float = 0.5


class Repairs:
    """Repairs the services of a run. Thread-safe. `count`: finished repairs; `seconds`: their total time, from notice
    to end; `restarts`: services that were started again in them.

    lost: returns the services that died or hang, each with its reason. start_again: starts them again, in a thread of
    this object; if it raises SlimeError, it is called again. fail: ends the run with an error.
    """

    def __init__(
        self,
        lost: Callable[[], Mapping[str, str]],
        start_again: Callable[[Mapping[str, str]], None],
        fail: Callable[[SlimeError], None],
        limits: RepairLimits,
    ) -> None:
        self.count = 0
        self.restarts = 0
        self.seconds = 0.0
        self._lost, self._start_again, self._fail, self._limits = lost, start_again, fail, limits
        self._began: defaultdict[str, deque[float]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._repairing = False
        self._error: SlimeError | None = None
        self._stopping = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="repairs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begins no more repairs. The caller ends the services that are being started."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def wait_until_whole(self) -> int:
        """Waits for the running repair; returns the number of finished ones. Raises the error that ended the run."""
        with self._changed:
            self._changed.wait_for(lambda: not self._repairing or self._stopping.is_set())
            if self._error is not None:
                raise self._error
            return self.count

    def explain(self, error: SlimeError, count: int) -> bool:
        """Returns whether to repeat a call that failed with `error`: since `count` repairs were finished, a service was
        lost and is back. Raises the error that ended the run."""
        deadline = time.monotonic() + (NOTICE_SECONDS if error.status in CONSEQUENCES else 0.0)
        while not self._stopping.is_set():
            self._look()
            if self.wait_until_whole() != count:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return False

    def _watch(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS) and self._error is None:
            try:
                lost = self._look()
            except Exception as error:
                # For example, too many open files. Without this thread a later call would wait for ever.
                log.warning("the services cannot be looked at: %s", error)
                continue
            if lost:
                self._repair()

    def _look(self) -> bool:
        """Returns whether a service is lost, and if so makes calls wait from now on."""
        with self._looking:
            if not self._repairing and self._error is None and self._lost() and not self._stopping.is_set():
                with self._changed:
                    self._repairing = True
        return self._repairing

    def _repair(self) -> None:
        began, lost, reasons = time.monotonic(), dict[str, str](), dict[str, str]()
        try:
            lost = dict(self._lost())
            pause = self._limits.pause_seconds
            while lost and not self._stopping.is_set():
                failed_before = reasons.keys() & lost.keys()
                reasons |= lost
                for name, reason in lost.items():
                    self._count(name, reason, began)
                    log.warning("%s %s, and is started again; logs/%s.log has its last lines", name, reason, name)
                if failed_before:
                    # The cause may pass by itself, such as a port that another program holds for a moment.
                    if self._stopping.wait(pause):
                        return
                    pause = min(2 * pause, LONGEST_PAUSE)
                try:
                    self._start_again(lost)
                    failed: Mapping[str, str] = {}
                except SlimeError as error:
                    if self._stopping.is_set():
                        return
                    log.warning("%s did not start again: %s", " and ".join(lost), error.message)
                    failed = {name: f"did not start again: {error.message}" for name in lost}
                # Others may have been lost meanwhile.
                lost = {**self._lost(), **failed}
            if reasons and not self._stopping.is_set():
                seconds = time.monotonic() - began
                self.seconds += seconds
                log.warning(
                    "%s %s back after %.1f s", " and ".join(reasons), "is" if len(reasons) == 1 else "are", seconds
                )
        except SlimeError as error:
            self._end(error)
        except Exception as error:
            if self._stopping.is_set():
                return  # the services are being stopped
            log.exception("services cannot be started again")
            names = " and ".join(reasons or lost)
            self._end(ServiceDied(f"{names} cannot be started again: {error}", field=names))
        finally:
            with self._changed:
                self._repairing = False
                self.count += 1
                self._changed.notify_all()

    def _end(self, error: SlimeError) -> None:
        if not self._stopping.is_set():
            self._error = error
            self._fail(error)

    def _count(self, name: str, reason: str, since: float) -> None:
        """Counts one more restart in the repair that began at `since`. Raises ServiceDied if there are too many."""
        now, began, limits = time.monotonic(), self._began[name], self._limits
        # Attempts of this repair stay counted, because each may take longer than the window.
        while began and since - began[0] > limits.window_seconds:
            began.popleft()
        if len(began) >= limits.most:
            raise ServiceDied(
                f"{name} was started again {counted(len(began), 'time')} within {limits.window_seconds:g} s, the most "
                f"that --service-max-restarts and --service-restart-window allow. Now it {reason}",
                field=name, value=len(began), expected=f"at most {counted(limits.most, 'restart')}",
            )  # fmt: skip
        began.append(now)
        self.restarts += 1
