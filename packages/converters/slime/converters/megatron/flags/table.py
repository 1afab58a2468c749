"""The table of Megatron's command-line flags: what each one sets, and whether it is used or refused here."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Mapping
from typing import Any

from slime.converters.megatron.flags.installed import arguments_file, with_installed
from slime.converters.megatron.flags.rows import FlagRow, committed
from slime.types.errors import InvalidSetting


@functools.cache
def table() -> tuple[FlagRow, ...]:
    """Returns the rows of flags.tsv, with the names and defaults of the Megatron-LM on the path, if there is one.

    The environment variable SLIME_MEGATRON_FLAGS=own keeps to flags.tsv.
    """
    path = None if os.environ.get("SLIME_MEGATRON_FLAGS") == "own" else arguments_file()
    return committed() if path is None else with_installed(path, committed())


@functools.cache
def by_dest() -> dict[str, FlagRow]:
    """Returns the rows of flags that are taken or declared elsewhere, by attribute."""
    return {row.dest: row for row in table() if row.status != "refused"}


@functools.cache
def _refusals() -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    names = {flag: row.note for row in table() if row.status == "refused" for flag in row.flags}
    prefixes = tuple((flag[:-1], note) for flag, note in names.items() if flag.endswith("*"))
    return names, prefixes


def why_refused(flag: str) -> str | None:
    """Returns the reason why `flag` (with dashes) is refused; None for one that is not."""
    if any(flag in row.flags for row in by_dest().values()):
        return None
    names, prefixes = _refusals()
    return names.get(flag) or next((note for prefix, note in prefixes if flag.startswith(prefix)), None)


def defaults() -> dict[str, Any]:
    """Returns Megatron-LM's defaults of all flags that are taken, by attribute."""
    return {row.dest: row.default for row in by_dest().values() if row.taken}


def config_fields(args: Mapping[str, Any], config: str) -> dict[str, Any]:
    """Returns the keyword arguments of `config` (one of CONFIGS) that `args`, attributes of Megatron's flags, set.

    A missing attribute sets nothing. Types and enumerations of torch and megatron-core are imported for those that
    need them: `exp_avg_dtype="bf16"` gives torch.bfloat16, `attention_backend="flash"` gives AttnBackend.flash.
    """
    fields: dict[str, Any] = {}
    for row in by_dest().values():
        for target in row.sets:
            name, _, field = target.lstrip("!").partition(".")
            if name == config and row.dest in args:
                value = args[row.dest]
                fields[field] = not value if target.startswith("!") else _as_field(row.dest, value)
    return fields


def _as_field(dest: str, value: Any) -> Any:
    if dest.endswith("_dtype") and dest != "moe_router_dtype" and isinstance(value, str):
        import torch

        types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
        return types[value]
    if dest == "attention_backend" and isinstance(value, str):
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[value]
    return value


def pattern(text: str) -> int | list[int]:
    """Reads `3` or a list expression such as `[0]*3+[1]*57`. Raises ValueError."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        value = None
    if isinstance(value, list) and not all(isinstance(item, int) for item in value):
        value = None
    if value is None:
        raise ValueError("expected an integer or a list of integers such as [0]*3+[1]*57")
    return value


def _evaluate(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right):
            return left + right
        # A limit, since a pattern lists the layers of a model and is user input.
        lengths = [len(side) if isinstance(side, list) else side for side in (left, right) if side is not None]
        if (
            isinstance(node.op, ast.Mult)
            and {type(left), type(right)} <= {int, list}
            and type(left) is not type(right)
            and max(lengths) <= 10_000
        ):
            return left * right
    return None


def pattern_text(value: int | list[int]) -> str:
    """Returns the shortest text that `pattern` reads as `value`."""
    if isinstance(value, int):
        return str(value)
    runs: list[list[int]] = []
    for item in value:
        if runs and runs[-1][0] == item:
            runs[-1][1] += 1
        else:
            runs.append([item, 1])
    if len(runs) * 4 > len(value) + 4:
        return str(value).replace(" ", "")
    return "+".join(f"[{item}]" if count == 1 else f"[{item}]*{count}" for item, count in runs)


def number(text: str) -> int | float:
    """Reads a number: an integer if `text` is one (also 1e6), else a float. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
    return int(value) if value.is_integer() else value


def row_of(dest: str) -> FlagRow:
    """Returns the row of an attribute. Raises InvalidSetting."""
    row = by_dest().get(dest)
    if row is None:
        raise InvalidSetting(f"{dest}: no flag of Megatron sets it", field=dest, expected="an attribute of its args")
    return row
