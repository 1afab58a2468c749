"""Runs the `slime` program as `python -m slime.launcher.cli`."""

from slime.launcher.cli import program

program()
