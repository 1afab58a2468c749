"""Prints a recording as JSON, one sample per line: `python -m slime.rollout.recordings FILE`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.recordings.rollouts import read_rollout
from slime.types.errors import InvalidFile, MissingFile


def _as_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else str(value)


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m slime.rollout.recordings FILE", file=sys.stderr)
        return 2
    try:
        recorded = read_rollout(Path(argv[0]))
    except (MissingFile, InvalidFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        for group in recorded.groups:
            for sample in group.samples:
                print(json.dumps({"dataset": group.dataset} | sample.to_dict(), default=_as_json))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; nothing may be flushed into it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
