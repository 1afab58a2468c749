"""The signals that end a run, and those that must not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from slime.launcher.platform.signals import Terminated, deferred, terminate_as_interrupt, uninterrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_would_end_the_process_is_an_interrupt_with_its_number(number: signal.Signals) -> None:
    # Tests may run under nohup.
    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(Terminated) as raised, terminate_as_interrupt():
            signal.raise_signal(number)
        assert raised.value.signum == number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminate_as_interrupt():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_second_signal_ends_the_stopping(number: signal.Signals) -> None:
    with terminate_as_interrupt(), uninterrupted():
        signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_block_must_not_be_interrupted_is_raised_at_its_end(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    reached = []
    try:
        with pytest.raises(Terminated) as raised, terminate_as_interrupt(), deferred(60, pytest.fail):
            # As Ray does when it starts.
            signal.signal(number, lambda *_: pytest.fail("not this handler"))
            signal.raise_signal(number)
            signal.raise_signal(number)
            reached.append(number)
            raise RuntimeError("a start that failed because of the signal")
        assert raised.value.signum == number and reached
    finally:
        signal.signal(number, before)


def test_a_block_that_no_signal_reached_ends_as_it_does() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyError), deferred(60, pytest.fail):
        raise KeyError
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), deferred(60, pytest.fail):
        signal.raise_signal(signal.SIGINT)


def test_a_block_that_goes_on_for_too_long_after_a_signal_is_interrupted() -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    abandoned: list[int] = []
    try:
        # As long again is this thread's time to answer, also on a busy machine.
        with pytest.raises(Terminated), terminate_as_interrupt(), deferred(3, abandoned.append) as received:
            signal.raise_signal(signal.SIGTERM)
            assert received == [signal.SIGTERM]
            threading.Event().wait(60)
            pytest.fail("nothing interrupted it")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not abandoned


def test_a_block_that_is_not_even_interrupted_is_abandoned() -> None:
    abandoned: list[int] = []
    left = threading.Event()

    def abandon(number: int) -> None:
        abandoned.append(number)
        left.set()

    with pytest.raises(KeyboardInterrupt), deferred(0.01, abandon):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            threading.Event().wait(60)
            pytest.fail("nothing interrupted it")
        left.wait(60)
    assert abandoned == [signal.SIGINT]


@pytest.mark.parametrize(("code", "ends"), [(0, -signal.SIGABRT), (1, -signal.SIGABRT), (143, 143)])
def test_a_crash_of_an_interpreter_that_ends_does_not_replace_the_code_of_a_signal(code: int, ends: int) -> None:
    words = "import atexit, os; from slime.launcher.platform.signals import leave; atexit.register(os.abort)"
    program = f"{words}; print('said'); leave({code})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, timeout=120)
    assert done.returncode == ends, done.stderr
    if code == ends:
        assert done.stdout == b"said\n"
