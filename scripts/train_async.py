"""`slime train-async`, under the name that jobs on a Ray cluster call."""

import sys

from slime.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main(["train-async", *sys.argv[1:]]))
