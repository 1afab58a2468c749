"""Where a run writes: directories that are there, or can be made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.types.errors import InvalidSetting

# Settings that name a directory to write into; fields in braces are the last part of one.
DIRECTORIES = (
    "output_dir", "save", "save_hf", "buffer_dir", "update_weight_disk_dir", "dump_details", "memory_snapshot_dir",
    "wandb_dir",
)  # fmt: skip


def check_places(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for a directory that is a file, lies below one, or is not ours to write."""
    for name in DIRECTORIES:
        value = args.get(name)
        if value:
            _check("--" + name.replace("_", "-"), str(value), Path(str(value).split("{", 1)[0] or "."))


def saved_below(args: Mapping[str, Any]) -> list[str]:
    """Absolute directories below which a run saves checkpoints and models. args: flat, with `checkpoint_dir`."""
    directories = [str(args["output_dir"]), str(args["checkpoint_dir"])]
    if template := args["save_hf"]:
        before, braces, _ = str(template).partition("{")
        directories.append(os.path.dirname(before) if braces else before)
    return [os.path.abspath(directory) for directory in directories]


def _check(flag: str, value: str, path: Path) -> None:
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir():
        raise InvalidSetting(
            f"{flag} {value}: {path} is a file, expected a directory", field=flag, value=value, expected="a directory"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidSetting(
            f"{flag} {value}: no permission to write in {path}",
            field=flag, value=value, expected="a directory that this user may write",
        )  # fmt: skip
