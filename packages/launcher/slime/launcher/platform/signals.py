"""The signals that end a run: SIGINT, SIGTERM and SIGHUP raise in the main thread, so that a run ends in one way.

This module imports little, so that the handlers are in place before anything heavy is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

# SIGHUP arrives when the terminal closes.
TERMINATING = (signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, handled like Ctrl-C. signum: the number of the signal."""

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__()
        self.signum = signum


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise Terminated in the main thread.

    A SIGHUP that is ignored, as `nohup` does, stays ignored.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    with _handling(handler, *(n for n in TERMINATING if signal.getsignal(n) is not signal.SIG_IGN)):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores SIGINT, SIGTERM and SIGHUP while a run is being stopped: a second Ctrl-C leaves nothing behind."""
    with _handling(signal.SIG_IGN, signal.SIGINT, *TERMINATING):
        yield


@contextmanager
def deferred(patience_seconds: float, abandon: Callable[[int], object]) -> Iterator[list[int]]:
    """Holds SIGINT, SIGTERM and SIGHUP back until the block has ended, whatever handlers the block installs for them;
    yields a list of the signals that came.

    For blocks that leave processes behind when they are interrupted. After the block, the first signal goes to the
    handler that was installed before, in place of any error of the block. A block that runs for longer than
    `patience_seconds` after a signal is interrupted by KeyboardInterrupt. If that does not end it, because it is inside
    native code, `abandon` is called with the signal in another thread after as many seconds again.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = [n for n in (signal.SIGINT, *TERMINATING) if signal.getsignal(n) is not signal.SIG_IGN]
    real = signal.signal
    main, ended, overdue = threading.get_ident(), threading.Event(), threading.Event()

    def install(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in numbers else real(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        if overdue.is_set() and not ended.is_set():
            raise KeyboardInterrupt
        received.append(number)
        if len(received) == 1:
            threading.Thread(target=hurry, name="hurry", daemon=True).start()

    def hurry() -> None:
        if not ended.wait(patience_seconds):
            overdue.set()
            signal.pthread_kill(main, received[0])
            if not ended.wait(patience_seconds):
                abandon(received[0])

    with _handling(note, *numbers):
        signal.signal = install  # type: ignore[assignment]
        try:
            yield received
        except BaseException:
            if not received:
                raise
        finally:
            ended.set()
            signal.signal = real
    if received:
        signal.raise_signal(received[0])


def farewell(signum: int) -> tuple[str, int]:
    """Returns the last line and the exit code of a command that a signal has ended."""
    outcome = "interrupted" if signum == signal.SIGINT else "terminated"
    return f"slime: {outcome}; everything that this run started has been stopped", 128 + signum


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code.

    After a signal it ends without the interpreter's shutdown: threads of Ray and gRPC, interrupted at any point, crash
    in it at times, and the exit code would be that of the crash.
    """
    if code > 128:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any] | signal.Handlers, *numbers: int) -> Iterator[None]:
    """Sets signal handlers for a block; does nothing outside the main thread, which alone may set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
