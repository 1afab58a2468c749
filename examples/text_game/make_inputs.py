"""Writes a tiny untrained model and a prompt for each of 80 games. Usage: python make_inputs.py DIRECTORY"""

from __future__ import annotations

import sys
from pathlib import Path

from game import FindTheDigit  # pants: no-infer-dep

from slime.launcher.tiny_model import write_model
from slime.rollout.adapters.gym import prompts

directory = Path(sys.argv[1])
write_model(directory / "model", characters="0123456789<>?", seed=0)
prompts(FindTheDigit, range(80), directory / "prompts.jsonl", chat=False)
