"""`slime train-async`, under the name that jobs on a Ray cluster call."""

import sys

from slime.launcher.cli import main
from slime.launcher.platform.signals import leave

if __name__ == "__main__":
    leave(main(["train-async", *sys.argv[1:]]))
