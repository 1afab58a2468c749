"""`python -m slime.launcher.cli` is `slime`."""

from slime.launcher.cli import program

program()
