"""Shell completion by argcomplete, which is optional: `eval "$(register-python-argcomplete slime)"`."""

from __future__ import annotations

import argparse
import importlib
import os

from slime.launcher.cli import COMMANDS
from slime.types.settings import Parser


def complete() -> None:
    """Answers the shell with what the typed line can go on with, and exits. Returns where argcomplete is missing."""
    try:
        argcomplete = importlib.import_module("argcomplete")
    except ImportError:
        return
    words = os.environ.get("COMP_LINE", "").split()
    argcomplete.autocomplete(line_parser(words[1] if len(words) > 1 else ""))


def line_parser(command: str) -> argparse.ArgumentParser:
    """Makes the parser of a whole line. Only `command` gets its flags: the others' would take time to import."""
    parser = Parser(prog="slime")
    parser.add_argument("--version", action="store_true", help="Print the versions")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, known in COMMANDS.items():
        commands.add_parser(name, help=known.about)
    if command in COMMANDS:
        module = importlib.import_module(COMMANDS[command].module)
        commands.choices[command] = module.parser(command)
    return parser
