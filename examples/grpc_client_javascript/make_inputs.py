"""Writes a tiny untrained model that knows the digits. Usage: python make_inputs.py DIRECTORY"""

from __future__ import annotations

import sys
from pathlib import Path

from slime.launcher.tiny_model import write_model

write_model(Path(sys.argv[1]) / "model", characters="0123456789:", seed=0)
