"""Writes a tiny untrained model and pairs of answers to prompts like "3:". Usage: python make_inputs.py DIRECTORY"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from slime.launcher.tiny_model import write_model

directory = Path(sys.argv[1])
write_model(directory / "model", characters="0123456789:", seed=0)
numbers = random.Random(0)
with (directory / "pairs.jsonl").open("w") as file:
    for _ in range(2000):
        first = numbers.randrange(1, 10)
        chosen = "".join(str((first + step) % 10) for step in range(1, 4))
        rejected = "".join(str(numbers.randrange(10)) for _ in range(3))
        if rejected != chosen:
            file.write(json.dumps({"prompt": f"{first}:", "metadata": {"chosen": chosen, "rejected": rejected}}) + "\n")
