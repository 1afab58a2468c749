"""Whether a Hugging Face directory is already what a conversion is about to write."""

from __future__ import annotations

import json
from pathlib import Path

from slime.converters.safetensors_dir import SafetensorsDir, disk_errors
from slime.types.errors import InvalidSetting, MissingFile, SlimeError

MARK = "slime.json"


def write_mark(directory: Path, mark: str) -> None:
    """mark: a fingerprint of the source and of what was asked for. Raises OutOfSpace."""
    with disk_errors(directory):
        (directory / MARK).write_text(json.dumps({"source": mark}) + "\n")


def check_hf_output(target: Path, mark: str, overwrite: bool) -> bool:
    """Whether `target` is complete and was made of the same source in the same way.

    Raises InvalidSetting where it is something else that may not be replaced: what slime-convert did not write, ever;
    what it did, without `overwrite`.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    if not target.is_dir():
        raise _taken(target, "is no directory", "a new directory")
    if not (target / MARK).is_file():
        raise _taken(target, "holds something that slime-convert did not write", "a new directory")
    if overwrite:
        return False
    try:
        found = json.loads((target / MARK).read_text()).get("source")
        SafetensorsDir(target)
        if not (target / "config.json").is_file():
            raise MissingFile("no config.json", field="path", value=str(target / "config.json"))
    except (ValueError, AttributeError, SlimeError) as error:
        raise _taken(target, f"is damaged ({error})", "--overwrite, to replace it") from None
    if found != mark:
        raise _taken(target, "was made of another checkpoint or with other flags", "--overwrite, to replace it")
    return True


def _taken(target: Path, what: str, expected: str) -> InvalidSetting:
    return InvalidSetting(
        f"--output-dir: {target} {what}; expected {expected}",
        field="--output-dir",
        value=str(target),
        expected=expected,
    )
