"""Where the checkpoints of a run lie: `DIR/step_000004` holds the policy after step 4."""

from __future__ import annotations

import re
from pathlib import Path

from slime.types.errors import MissingFile

STATE_FILE = "trainer.json"  # the trainer writes it into every checkpoint; a directory appears complete or not at all
NAME = re.compile(r"step_(\d+)$")


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def find_checkpoint(path: str) -> str:
    """`path` where it is a checkpoint, or the newest one in it. Raises MissingFile naming --load."""
    given = Path(path)
    if (given / STATE_FILE).is_file():
        return path
    found = (
        [p for p in given.glob("step_*") if NAME.search(p.name) and (p / STATE_FILE).is_file()]
        if given.is_dir()
        else []
    )
    if not found:
        raise MissingFile(
            f"--load: no checkpoint in {path}",
            field="--load",
            value=path,
            expected=f"a directory with {STATE_FILE} or step_NNNNNN",
        )
    return str(max(found, key=lambda p: int(p.name.removeprefix("step_"))))
