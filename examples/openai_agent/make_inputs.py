"""Writes a tiny untrained model that can chat, and seven games. Usage: python make_inputs.py DIRECTORY"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from slime.launcher.tiny_model import write_model

# The text of every message, one after the other.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

directory = Path(sys.argv[1])
write_model(directory / "model", characters="1234567?+-", seed=0, chat_template=CHAT_TEMPLATE)
rows = [{"prompt": "?", "metadata": {"secret": secret}} for secret in range(1, 8)]
(directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
