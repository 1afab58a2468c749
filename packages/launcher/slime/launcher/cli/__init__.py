"""The `slime` program: its first word selects a command, and each command is a module."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from slime.launcher.platform.signals import leave
from slime.types.programs import command_list, run_printing, wrong_command
from slime.types.settings import Parser


class Command(NamedTuple):
    """A command. module: defines `main(name, words)`, which returns the exit code, and `parser(name)`."""

    module: str
    about: str


COMMANDS = {
    "init": Command("slime.launcher.cli.init", "Write a small project that trains as it is"),
    "train": Command("slime.launcher.cli.train", "Train a policy; --dry-run prints the plan of a run"),
    "train-async": Command(
        "slime.launcher.cli.train",
        "Train while the next rollout is generated; --fully-async generates without pause",
    ),
    "resume": Command("slime.launcher.cli.resume", "Continue from the newest checkpoint of a run"),
    "eval": Command("slime.launcher.cli.evaluate", "Score a model on data: mean, error and every response"),
    "chat": Command("slime.launcher.cli.chat", "Talk to a model in the terminal"),
    "export": Command("slime.launcher.cli.export", "Write a model for Hugging Face or llama.cpp"),
    "tinker": Command("slime.launcher.tinker.command", "Serve a model to the tinker SDK, which trains and samples"),
    "doctor": Command(
        "slime.launcher.doctor.command",
        "Check this machine, and the files and addresses that a run's flags name, before the run costs money",
    ),
    "show": Command(
        "slime.launcher.show.command",
        "Look at a run in the browser: curves, samples token by token, failures; --text, --html FILE",
    ),
    "runs": Command("slime.launcher.show.command", "List runs with their state, reward and scores"),
    "compare": Command("slime.launcher.show.command", "Show the settings and metrics of two or more runs side by side"),
}
# Packages with programs of their own: slime-buffer, ...
SERVICES = ("buffer", "rollout", "trainer", "convert")


PACKAGES = ("types", "buffer", "rollout", "converters", "trainer", "launcher")


def usage() -> str:
    return (
        f"usage: slime COMMAND ...\n\n{command_list({name: command.about for name, command in COMMANDS.items()})}\n\n"
        "`slime COMMAND --help` describes a command; `slime --version` prints the versions.\n"
    )


def program(*words: str) -> NoReturn:
    """Runs a command and ends the process, as the `slime` program does.

    words: stand before those of the command line.
    """
    leave(run_printing("slime", lambda: main([*words, *sys.argv[1:]])))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0 for success, 1 if the run failed, 2 for wrong flags or files, 3 for a dry run that does
    not fit, 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP; `program` adds 141."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(versions_text(), end="")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        other_program = f"unknown command {words[0]!r}; use slime-{words[0]}" if words[0] in SERVICES else ""
        print(f"slime: error: {other_program or wrong_command(words, COMMANDS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(command.module).main(words[0], words[1:]))


def versions_text() -> str:
    """Returns the versions, one line for each package of this project and one for Python."""
    versions = {f"slime-{name}": _version(f"slime-{name}") for name in PACKAGES}
    width = max(map(len, versions)) + 2
    versions["Python"] = platform.python_version()
    return "".join(f"{name:<{width}}{found}\n" for name, found in versions.items())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed: its modules come from PYTHONPATH"


def complete() -> None:
    """Prints the completions of the typed line for the shell, and exits. Returns if argcomplete is not installed."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        return
    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(line_parser(words[1] if len(words) > 1 else ""))


def line_parser(command: str) -> argparse.ArgumentParser:
    """Makes the parser of a whole line. Only `command` gets its flags, because importing all of them takes time."""
    parser = Parser(prog="slime")
    parser.add_argument("--version", action="store_true", help="Print the versions")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, known in COMMANDS.items():
        commands.add_parser(name, help=known.about)
    if command in COMMANDS:
        module = importlib.import_module(COMMANDS[command].module)
        commands.choices[command] = module.parser(command)
    return parser
