"""Checks the value of a setting against the type, the bounds and the choices of its field.

Fields are those of `slime.types.settings.setting`. Raises InvalidSetting, which names the flag, the value and what was
expected.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.types.errors import InvalidSetting

NUMBERS = {"int": "an integer", "float": "a number"}
# A variable of the shell that is not set is an empty value, and Path("") is the current directory.
A_PATH = "a path"


def flag_name(field: str) -> str:
    """Spells the flag of a field: `lease_seconds` -> `--lease-seconds`.

    `settings.flag_names` knows aliases, too, and the flags that turn a setting off.
    """
    return "--" + field.replace("_", "-")


def is_json(value: Any) -> bool:
    """Returns whether JSON can hold the value of a setting."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def value_type(hint: Any) -> tuple[Any, bool]:
    """Returns the scalar type of an annotation, and whether it is a list: `list[str] | None` -> (str, True)."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return value_type(arguments[0])
    origin = typing.get_origin(hint)
    if origin is list:
        return (typing.get_origin(arguments[0]) or arguments[0], True)
    return (origin or hint, False)


def check(field: dataclasses.Field[Any], hint: Any, value: Any, name: str = "") -> Any:
    """Returns `value` as the type of the field, within its bounds. name: the setting in errors (default: its flag)."""
    meta = field.metadata
    name = name or flag_name((meta["flags"] or (field.name,))[0])
    if value is None:
        if type(None) in typing.get_args(hint):
            return None
        raise InvalidSetting.must_be(name, _kind(value_type(hint)[0]), got=None)
    base, many = value_type(hint)
    if many and not isinstance(value, (list, tuple)):
        raise InvalidSetting.must_be(name, "a list", got=value)
    items = [_coerce(name, base, meta, item) for item in value] if many else [_coerce(name, base, meta, value)]
    for item in items:
        _check_bounds(name, meta, item)
        if item == "" and field.name.endswith(("_dir", "_path")):
            raise InvalidSetting.must_be(name, A_PATH, got="")
    return items if many else items[0]


def _kind(base: Any) -> str:
    kinds = {
        int: "an integer",
        float: "a number",
        str: "text",
        bool: "true or false",
        list: "a list",
        dict: "a mapping",
    }
    return kinds.get(base, A_PATH if isinstance(base, type) and issubclass(base, Path) else "a value")


def _coerce(name: str, base: Any, meta: Mapping[str, Any], value: Any) -> Any:
    if meta["parse"] is not None and isinstance(value, str):
        try:
            return meta["parse"](value)
        except ValueError as error:
            raise InvalidSetting.must_be(name, str(error).removeprefix("expected "), got=value) from None
    if base is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML reads 1e-6 as a string.
        try:
            return float(value)
        except (ValueError, OverflowError):
            raise InvalidSetting.must_be(name, "a number", got=value) from None
    if isinstance(base, type) and issubclass(base, Path) and isinstance(value, str):
        return base(value)
    if base is Any or base is list or (isinstance(value, base) and not (base is int and isinstance(value, bool))):
        return value
    raise InvalidSetting.must_be(name, _kind(base), got=value)


def named_path(text: str) -> Path:
    """Returns the path of an argument, as argparse's `type`; an empty one is refused."""
    if not text:
        raise argparse.ArgumentTypeError(f"must be {A_PATH}, got ''")
    return Path(text)


def _check_bounds(name: str, meta: Mapping[str, Any], value: Any) -> None:
    if meta["choices"] and value not in (*meta["choices"], *meta["refused"]):
        raise InvalidSetting.one_of(name, meta["choices"], got=value)
    for bound, wrong, words in (
        (meta["minimum"], lambda v, b: not v >= b, "at least"),
        (meta["above"], lambda v, b: not v > b, "greater than"),
        (meta["maximum"], lambda v, b: not v <= b, "at most"),
    ):
        if bound is not None and wrong(value, bound):
            raise InvalidSetting.must_be(name, f"{words} {bound}", got=value)
    check_text(name, value)
    if isinstance(value, int) and value.bit_length() > 63:
        raise InvalidSetting.must_be(name, "an integer of 64 bits", got=value)
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidSetting.must_be(name, "a finite number", got=value)


def check_text(name: str, value: Any) -> None:
    """Raises InvalidSetting for text with a NUL character, also in lists: no path, address or argument can hold one."""
    for item in value if isinstance(value, list | tuple) else ():
        check_text(name, item)
    if isinstance(value, str | Path) and "\0" in str(value):
        raise InvalidSetting.must_be(name, "text without a NUL character", got=str(value))


def argparse_error(message: str, helps: Mapping[Any, str | None]) -> InvalidSetting:
    """Returns the error for a message of argparse, in the words of other errors."""
    if missing := re.fullmatch(r"the following arguments are required: ([^,]*).*", message):
        return InvalidSetting.required(missing[1], helps.get(missing[1].split("/")[0]) or "")
    if missing := re.fullmatch(r"one of the arguments (.*) is required", message):
        return InvalidSetting.required(missing[1].replace(" ", " or "))
    named = re.match(r"argument (--[\w-]+|\w+)(?:/\S+)?(?: .*?)?: (.*)", message, re.DOTALL)
    if named is None:
        return InvalidSetting(message)
    name, fault = named[1], named[2]
    if joined := re.fullmatch(r"ignored explicit argument (.*)", fault):
        return InvalidSetting(f"{name} is a switch and takes no value, got {joined[1]}", field=name)
    if fault.startswith("must be "):
        return InvalidSetting(f"{name} {fault}", field=name)
    if re.fullmatch(r"expected (one|at least one|\d+) arguments?", fault):
        return InvalidSetting.requires(name, fault.removeprefix("expected ").replace("argument", "value"))
    if excluded := re.fullmatch(r"not allowed with argument (.*)", fault):
        return InvalidSetting.conflict(name, excluded[1])
    if wrong := re.fullmatch(r"invalid (int|float) value: '(.*)'", fault, re.DOTALL):
        return InvalidSetting.must_be(name, NUMBERS[wrong[1]], got=wrong[2])
    if wrong := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", fault, re.DOTALL):
        return InvalidSetting.one_of(name, wrong[2].replace("'", "").split(", "), got=wrong[1])
    return InvalidSetting(f"{name}: {fault}", field=name)
