"""Findings of checks, and their runner: each check has a deadline, and a check that fails does not stop the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.types.errors import SlimeError

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    status: ok, warn or FAIL. what: the observation. todo: how to correct it. check: the name of the check.
    """

    status: str
    what: str
    todo: str = ""
    check: str = ""

    def line(self) -> str:
        return f"{self.status:4}  {self.what}" + (f"  -> {self.todo}" if self.todo else "")


def ok(what: str) -> Finding:
    return Finding(OK, what)


def warn(what: str, todo: str) -> Finding:
    return Finding(WARN, what, todo)


def fail(what: str, todo: str) -> Finding:
    return Finding(FAIL, what, todo)


@dataclass(frozen=True)
class Subject:
    """The run that the checks examine, besides this machine.

    args: every setting of the run by its name, with defaults. given: names of the settings that were set.
    config: the RunConfig of the whole run; None if the flags do not make a complete run.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    config: Any = None

    def flag(self, name: str) -> Any:
        """Returns the value of a setting; None if it has none."""
        return self.args.get(name)


Check = Callable[[Subject], Iterator[Finding]]
_DONE = object()


def run_checks(checks: Mapping[str, Check], subject: Subject, seconds: float) -> Iterator[Finding]:
    """Yields the findings of `checks` as they arrive. A check that raises or exceeds `seconds` yields a FAIL."""
    for name, check in checks.items():
        for finding in _run(check, name, subject, seconds):
            yield Finding(finding.status, finding.what, finding.todo, check=name)


def _run(check: Check, name: str, subject: Subject, seconds: float) -> Iterator[Finding]:
    queued: queue.Queue[Any] = queue.Queue()

    def work() -> None:
        try:
            for finding in check(subject):
                queued.put(finding)
        except SlimeError as error:
            queued.put(fail(str(error), "correct what the message names"))
        except (Exception, SystemExit) as error:  # one broken check must not hide the others
            queued.put(
                fail(f"{name}: {type(error).__name__}: {error}", "the check itself failed; look at this by hand")
            )
        queued.put(_DONE)

    threading.Thread(target=work, name=f"doctor-{name}", daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            item = queued.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            yield fail(f"{name}: no answer within {seconds:g} s", "find out what hangs there, or raise --timeout")
            return
        if item is _DONE:
            return
        yield item


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.status == FAIL for finding in findings))
