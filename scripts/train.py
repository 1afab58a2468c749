"""`slime train`, under the name that jobs on a Ray cluster call."""

import sys

from slime.launcher.__main__ import main

if __name__ == "__main__":
    sys.exit(main("train"))
