"""Recognises a Hugging Face directory that holds the result of a conversion already."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.types.directories import check_replaceable, read_mark
from slime.types.errors import InvalidSetting, MissingFile, SlimeError

WRITER = "slime-convert"
# Room for metadata, config and tokenizer beside the tensors.
SPARE_BYTES = 64 << 20


def check_hf_output(target: Path, source: str, overwrite: bool) -> bool:
    """Returns whether `target` is complete and was made of the same source (a fingerprint) in the same way.

    Raises InvalidSetting for a directory that must not be replaced: one that slime did not write, and, without
    `overwrite`, the result of another conversion.
    """
    check_replaceable(target, field="--output-dir")
    if overwrite or not target.exists() or not any(target.iterdir()):
        return False
    try:
        SafetensorsDir(target)
        if not (target / "config.json").is_file():
            raise MissingFile("no config.json", field="path", value=str(target / "config.json"))
    except SlimeError as error:
        raise _taken(target, f"is damaged ({error})") from None
    if (read_mark(target) or {}).get("source") != source:
        raise _taken(target, "was made of another checkpoint or with other flags")
    return True


def _taken(target: Path, what: str) -> InvalidSetting:
    expected = "--overwrite, to replace it"
    return InvalidSetting(
        f"--output-dir: {target} {what}; expected {expected}",
        field="--output-dir",
        value=str(target),
        expected=expected,
    )


def fingerprint(files: list[Path], options: dict[str, Any]) -> str:
    """Returns a text that changes with the files (size or time of change) and with the options."""
    state = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in sorted(files)]
    return hashlib.sha256(json.dumps([state, options], sort_keys=True, default=str).encode()).hexdigest()
