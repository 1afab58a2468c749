"""`python -m slime.trainer serve ...`."""

import sys

from slime.trainer.cli import main

sys.exit(main())
