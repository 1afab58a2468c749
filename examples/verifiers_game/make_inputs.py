"""Writes a tiny untrained model that can chat, and the prompts of the environment. Usage: python make_inputs.py DIR"""

from __future__ import annotations

import sys
from pathlib import Path

from environment import load_environment  # pants: no-infer-dep

from slime.launcher.tiny_model import write_model
from slime.rollout.adapters.verifiers import prompts

# The text of every message, one after the other.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

directory = Path(sys.argv[1])
write_model(directory / "model", characters="0123456789<>?", seed=0, chat_template=CHAT_TEMPLATE)
prompts(load_environment, directory / "prompts.jsonl")
