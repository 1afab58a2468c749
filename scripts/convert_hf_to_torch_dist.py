"""`slime-convert hf-to-torch-dist`, under the name that the recipes call."""

import sys

from slime.converters.cli import main

if __name__ == "__main__":
    sys.exit(main(["hf-to-torch-dist", *sys.argv[1:]]))
