"""Prompt files with a slice of rows behind the path: `PATH@[a:b]`."""

from __future__ import annotations

import re
import sys

from slime.types.errors import InvalidSetting
from slime.types.prompt_files.readers import BUFFER
from slime.types.prompt_files.reasoning_gym import local_file


def split_slice(source: str, flag: str = "--prompt-data", package: str = BUFFER) -> tuple[str, slice]:
    """Splits `data.jsonl@[10:20]` into ("data.jsonl", slice(10, 20)); `reasoning_gym:NAME` becomes its file's path.

    package: the package whose extra the error for a missing reasoning-gym names. Raises InvalidSetting if anything
    but a slice follows `@[`, and what `local_file` raises.
    """
    path, mark, bounds = source.rpartition("@[")
    if not mark:
        return local_file(source, flag, package), slice(None)
    match = re.fullmatch(r"(-?\d*):(-?\d*)\]", bounds)
    if match is None or "-" in match.groups():
        raise InvalidSetting.must_be(
            flag, "PATH@[a:b] with integers a and b, each of which may be left out", got=source
        )
    # Files have fewer rows than the largest index.
    start, stop = (min(int(text[:20]), sys.maxsize) if text else None for text in match.groups())
    return local_file(path, flag, package), slice(start, stop)
