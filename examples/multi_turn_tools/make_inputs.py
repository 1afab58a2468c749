"""Writes a tiny untrained model and 80 questions with tables. Usage: python make_inputs.py DIRECTORY"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from slime.launcher.tiny_model import write_model

KEYS = "abcd"

directory = Path(sys.argv[1])
write_model(directory / "model", characters="0123456789?=:" + KEYS, seed=0)
draw = random.Random(0)
with (directory / "prompts.jsonl").open("w") as file:
    for key in KEYS * 20:
        table = {name: draw.choice("0123456789") for name in KEYS}
        print(json.dumps({"prompt": f"{key}:", "label": table[key], "metadata": {"table": table}}), file=file)
