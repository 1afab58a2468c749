"""Command-line programs: lists of commands, help of many flags, and a standard output that takes no more text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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


class PrintHelp(argparse.Action):
    """Prints a text and exits. const: a function of the parser that makes the text when it is needed."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        self._text = options["const"]
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=options["help"])

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        self.show(self._text(parser))
        parser.exit()

    def show(self, text: str) -> None:
        print(text, end="")


def short_help(
    parser: argparse.ArgumentParser, first: Mapping[str, Sequence[str]], epilog: str = "", more: Sequence[str] = ()
) -> str:
    """Returns the help of some flags of a parser.

    first: names of the settings to describe, by title of their group. epilog: follows the hint at `--help-all`.
    more: flags to describe below `--config` and `--help-all`.
    """
    by_name = {action.dest: action for action in parser._actions}
    by_flag = {flag: action for action in parser._actions for flag in action.option_strings}
    groups = {title: [by_name[name] for name in names] for title, names in first.items()}
    groups["More"] = [by_flag[flag] for flag in ("--config", "--help-all", *more)]
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for title, actions in groups.items():
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    formatter.add_text(f"`{parser.prog} --help-all` describes every flag{epilog}.")
    return formatter.format_help()


def add_help_flags(parser: argparse.ArgumentParser, first: Mapping[str, Sequence[str]]) -> None:
    """Adds `--help`, which describes the settings `first`, and `--help-all` to a parser that has neither."""
    for names, text, about in (
        (("-h", "--help"), lambda p: short_help(p, first), "Show the flags that matter first, and exit"),
        (("--help-all",), argparse.ArgumentParser.format_help, "Describe every flag, and exit"),
    ):
        parser.add_argument(*names, action=PrintHelp, const=text, help=about)


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
