"""Command-line programs: lists of commands, and a standard output that takes no more text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from slime.types.errors import InvalidSetting

# Exit code of a program whose reader has left, as a shell shows a process that SIGPIPE ended.
PIPE_CLOSED = 141
# The exit code of a program that Ctrl-C ended.
INTERRUPTED = 130


def wrong_command(words: Sequence[str], known: Iterable[str], kind: str = "command") -> InvalidSetting:
    """Returns the error for a command line that is empty or whose first word is not in `known`."""
    if words:
        return InvalidSetting.unknown(kind, words[0], known)
    return InvalidSetting.required(f"a {kind}", f"one of {', '.join(known)}; see --help")


def command_list(commands: Mapping[str, str]) -> str:
    """Returns the part of a usage text that says what each command does: a phrase that begins with a capital."""
    width = max(map(len, commands)) + 2
    return "\n".join(["commands:", *(f"  {name:<{width}}{about}" for name, about in commands.items())])


def run_printing(program: str, command: Callable[[], int]) -> int:
    """Returns the exit code of `command`; PIPE_CLOSED if the reader of the standard output, such as `head`, has left;
    1 if that output takes no more text, which is said in one line; INTERRUPTED if Ctrl-C ended it.

    Raises what else `command` raises, unless it is the OSError of such an output.
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
    except KeyboardInterrupt:  # before the command was there to handle it, as while its modules are imported
        return INTERRUPTED
    except OSError as error:
        return _code_without_output(program, error)


def _code_without_output(program: str, error: OSError) -> int:
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # text that a caller collects
        raise error from None
    if error.filename is not None:
        raise error
    try:
        # Python's buffer may be empty although its last write failed, so the file itself is asked.
        os.write(output, b"\n")
    except OSError as refused:
        # The interpreter flushes the stream once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        if isinstance(refused, BrokenPipeError):
            return PIPE_CLOSED
        print(f"{program}: error: cannot write to the standard output: {refused.strerror}", file=sys.stderr)
        return 1
    raise error
