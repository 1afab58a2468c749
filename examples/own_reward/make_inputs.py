"""Writes a tiny untrained model and the prompts "2:", "3:", ... "9:". Usage: python make_inputs.py DIRECTORY"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slime.launcher.tiny_model import write_model

directory = Path(sys.argv[1])
write_model(directory / "model", characters="0123456789:", seed=0)
rows = [{"prompt": f"{divisor}:", "metadata": {"divisor": divisor}} for divisor in range(2, 10)]
(directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
