"""The standard output of the command-line programs: its reader may leave, and its disk may be full."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

# Exit code of a program whose reader has left, as a shell shows a process that SIGPIPE ended.
PIPE_CLOSED = 141


def run_printing(program: str, command: Callable[[], int]) -> int:
    """Returns the exit code of `command`; PIPE_CLOSED if the reader of the standard output, such as `head`, has left;
    1 if that output takes no more text, which is said in one line.

    Raises what `command` raises, unless it is the OSError of such an output.
    """
    if sys.stdout is None:  # closed by the shell, as in `slime runs >&-`
        sys.stdout = open(os.devnull, "w")
    try:
        try:
            code = command()
        except SystemExit:  # of --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except OSError as error:
        return _code_without_output(program, error)


def _code_without_output(program: str, error: OSError) -> int:
    if error.filename is not None:
        raise error
    try:
        # Python's buffer may be empty although its last write failed, so the file itself is asked.
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as refused:
        # The interpreter flushes the stream once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(refused, BrokenPipeError):
            return PIPE_CLOSED
        print(f"{program}: error: cannot write to the standard output: {refused.strerror}", file=sys.stderr)
        return 1
    raise error
