"""Reads and writes a checkpoint's `slime.json`, which the conversion back to a Hugging Face directory needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.converters.files.safetensors_dir import disk_errors

DESCRIPTION = "slime.json"
FORMAT = 1


def describe(directory: Path, args: Mapping[str, Any], dtype: str, **more: Any) -> None:
    """Writes `slime.json`.

    args: Megatron's arguments of the model. dtype: of the weights, as config.json spells it.
    more: source (a fingerprint), model_name (the family, where config.json names an unknown one), weight_map (tensor to
        file), narrow (tensor to dtype, where it was stored in a wider one), copies (tensor to the one that it is equal
        to), lost (tensors that no parameter was made of).
    Raises OutOfSpace.
    """
    data = {"format": FORMAT, "dtype": dtype, "args": plain(args), **more}
    with disk_errors(directory / DESCRIPTION):
        (directory / DESCRIPTION).write_text(json.dumps(data, indent=1) + "\n")


def plain(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that JSON and a restricted unpickler accept: numbers, strings and lists."""
    return {name: value for name, value in args.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))
