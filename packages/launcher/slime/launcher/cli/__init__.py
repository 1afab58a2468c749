"""The `slime` command: one module for each command, found by the first word."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from slime.types.settings import wrong_command


class Command(NamedTuple):
    """A command. module: it has `main(name, words)`, which returns the exit code, and `parser(name)`."""

    module: str
    about: str


COMMANDS = {
    "train": Command("slime.launcher.cli.train", "train a policy; --dry-run prints the plan of a run"),
    "train-async": Command(
        "slime.launcher.cli.train",
        "train while the next rollout is generated; --fully-async generates without pause",
    ),
    "doctor": Command(
        "slime.launcher.doctor.command", "check this machine, and what the flags of a run name, before it costs money"
    ),
    "show": Command(
        "slime.launcher.show.command",
        "look at a run in the browser: curves, samples token by token, what failed; --text, --html FILE",
    ),
    "runs": Command("slime.launcher.show.command", "list runs with their state, reward and scores"),
    "compare": Command("slime.launcher.show.command", "show the settings and metrics of two or more runs side by side"),
}
# Parts of the system with commands of their own: slime-buffer, ...
SERVICES = ("buffer", "rollout", "trainer", "convert")


def usage() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.about}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: slime COMMAND ...", "", "commands:", *lines, "",
            "`slime COMMAND --help` describes a command; `slime --version` prints the versions.", "",
        ]
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the run failed, 2 wrong flags or files, 3 a dry run that does not fit, 130 Ctrl-C,
    143 SIGTERM, 129 SIGHUP."""
    if "_ARGCOMPLETE" in os.environ:
        from slime.launcher.cli.completion import complete

        complete()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from slime.launcher.cli.version import versions_text

        print(versions_text(), end="")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        elsewhere = f"unknown command {words[0]!r}; use slime-{words[0]}" if words[0] in SERVICES else ""
        print(f"slime: error: {elsewhere or wrong_command(words, COMMANDS)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(command.module).main(words[0], words[1:]))
