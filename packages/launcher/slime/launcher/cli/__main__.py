"""`python -m slime.launcher.cli` is `slime`."""

import sys

from slime.launcher.cli import main

sys.exit(main())
