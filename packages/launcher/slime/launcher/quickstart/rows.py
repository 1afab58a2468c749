"""Writes the prompt files of a quickstart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slime.types.errors import InvalidSetting
from slime.types.files import write_whole


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as JSON lines. Raises InvalidSetting if `path` has other content, which is never replaced."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_whole(path, text, field="--output-dir")
    elif path.read_text() != text:
        raise InvalidSetting(
            f"--output-dir: {path} holds other prompts than this quickstart's; use another directory, or the --seed "
            "that they were made with",
            field="--output-dir", value=str(path), expected="another directory",
        )  # fmt: skip
