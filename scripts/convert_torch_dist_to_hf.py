"""`slime-convert torch-dist-to-hf`, under the name that the recipes call."""

import sys

from slime.converters.cli import main

if __name__ == "__main__":
    sys.exit(main(["torch-dist-to-hf", *sys.argv[1:]]))
