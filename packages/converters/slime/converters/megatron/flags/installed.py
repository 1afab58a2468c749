"""Reads the flags of a Megatron-LM on the path: its parser has the last word on names, choices and defaults.

Importing `megatron.training` takes seconds, so it happens once, in a process of its own. The resulting table is kept in
the user's cache directory until Megatron-LM's `arguments.py` changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.converters.megatron.flags.rows import FlagRow, committed, dump, load
from slime.types.errors import InvalidFile
from slime.types.setting_values import is_json

logger = logging.getLogger(__name__)
SECONDS = 180.0
UNUSED = "a flag of the installed Megatron-LM that nothing here uses"


def arguments_file() -> Path | None:
    """Returns Megatron-LM's `megatron/training/arguments.py`, if it is on the path; imports nothing."""
    spec = importlib.util.find_spec("megatron")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place, "training", "arguments.py")
        if path.is_file():
            return path
    return None


def with_installed(path: Path, rows: Sequence[FlagRow]) -> tuple[FlagRow, ...]:
    """Returns `rows` as the Megatron-LM of `path` has them; `rows` as they are, with a warning, where it cannot be
    imported."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256(f"{path} {path.stat().st_mtime_ns} {dump(rows)}".encode()).hexdigest()[:16]
    cached = Path(home, "slime", f"megatron-flags-{key}.tsv")
    try:
        return tuple(load(cached.read_text(encoding="utf-8")))
    except (OSError, InvalidFile):
        pass  # missing or truncated: written again
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch, "flags.tsv")
        try:
            subprocess.run(
                [sys.executable, "-m", __name__, str(output)],
                check=True, capture_output=True, text=True, timeout=SECONDS,
                env={**os.environ, "SLIME_MEGATRON_FLAGS": "own"},
            )  # fmt: skip
        except (subprocess.SubprocessError, OSError) as error:
            last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            logger.warning("the flags of %s cannot be read (%s): using those of Megatron-LM v0.16", path, "".join(last))
            return tuple(rows)
        text = output.read_text(encoding="utf-8")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        partial = cached.with_suffix(f".{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(cached)
    except OSError:
        logger.warning("%s cannot be written: Megatron-LM's flags are read again at each start", cached)
    return tuple(load(text))


def merge(rows: Sequence[FlagRow], parser: argparse.ArgumentParser, fields: dict[str, str]) -> list[FlagRow]:
    """Returns `rows` with the spellings, choices and defaults of `parser`; its other flags follow.

    fields: fields of megatron-core's configs, name -> `CLASS.FIELD`: another flag that sets one is used, others are
    refused.
    """
    known = {flag: position for position, row in enumerate(rows) for flag in row.flags}
    merged = list(rows)
    for action in parser._actions:
        flags = tuple(flag for flag in action.option_strings if flag.startswith("--"))
        if not flags or isinstance(action, argparse._HelpAction):
            continue
        position = next((known[flag] for flag in flags if flag in known), None)
        default = action.default if is_json(action.default) else None
        if position is None:
            merged.append(_new(action, flags, default, fields.get(action.dest)))
            continue
        row = rows[position]
        choices = tuple(map(str, action.choices or ())) if row.kind.startswith("str") else ()
        merged[position] = dataclasses.replace(
            row, flags=tuple(dict.fromkeys(row.flags + flags)), choices=choices or row.choices, default=default
        )
    return merged


def _new(action: argparse.Action, flags: tuple[str, ...], default: Any, target: str | None) -> FlagRow:
    refused = FlagRow(flags=flags, dest=action.dest, default=default, note=UNUSED, help=_one_line(action.help))
    kinds: dict[Any, str] = {int: "int", float: "float", str: "str", None: "str"}
    if isinstance(action, argparse._StoreTrueAction | argparse._StoreFalseAction):
        kind = "on" if isinstance(action, argparse._StoreTrueAction) else "off"
    elif action.type in kinds:
        kind = kinds[action.type] + ("*" if action.nargs in ("+", "*") else "")
    else:
        return refused
    if target is None:
        return refused
    choices = tuple(map(str, action.choices or ())) if kind.startswith("str") else ()
    return dataclasses.replace(refused, kind=kind, choices=choices, sets=(target,), status="used", note="")


def _one_line(text: str | None) -> str:
    words = " ".join((text or "").replace("%%", "%").split())
    return words if len(words) <= 160 else words[:157] + "..."


def _megatron_parser() -> argparse.ArgumentParser:
    from megatron.training import arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return arguments.add_megatron_arguments(parser) or parser


def _config_fields() -> dict[str, str]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    found: dict[str, str] = {}
    for cls in (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig):
        for field in dataclasses.fields(cls):
            found.setdefault(field.name, f"{cls.__name__}.{field.name}")
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(dump(merge(committed(), _megatron_parser(), _config_fields())), encoding="utf-8")
