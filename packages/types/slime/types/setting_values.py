"""What a setting's value must be: its type, and the bounds and choices of its field.

Fields are those of `slime.types.settings.setting`. Raises InvalidSetting naming the flag, the value and what was
expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.types.errors import InvalidSetting


def value_type(hint: Any) -> tuple[Any, bool]:
    """The scalar type of an annotation, and whether it is a list of them: `list[str] | None` -> (str, True)."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return value_type(arguments[0])
    origin = typing.get_origin(hint)
    if origin is list:
        return (typing.get_origin(arguments[0]) or arguments[0], True)
    return (origin or hint, False)


def check(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """`value` as the type of the field, within its bounds."""
    meta = field.metadata
    flag = "--" + (meta["flags"] or (field.name.replace("_", "-"),))[0]
    if value is None:
        if type(None) in typing.get_args(hint):
            return None
        raise InvalidSetting(f"{flag}: got None, expected a value", field=flag, value="None")
    base, many = value_type(hint)
    if many and not isinstance(value, (list, tuple)):
        raise InvalidSetting(f"{flag}: got {value!r}, expected a list", field=flag, value=value)
    items = [_coerce(flag, base, meta, item) for item in value] if many else [_coerce(flag, base, meta, value)]
    for item in items:
        _check_bounds(flag, meta, item)
    return items if many else items[0]


def _coerce(flag: str, base: Any, meta: Mapping[str, Any], value: Any) -> Any:
    if meta["parse"] is not None and isinstance(value, str):
        try:
            return meta["parse"](value)
        except ValueError as error:
            raise InvalidSetting(f"{flag}: got {value!r}, {error}", field=flag, value=value) from None
    if base is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        # YAML reads 1e-6 as a string.
        try:
            return float(value)
        except (ValueError, OverflowError):
            raise InvalidSetting(f"{flag}: got {value!r}, expected a number", field=flag, value=value) from None
    if isinstance(base, type) and issubclass(base, Path) and isinstance(value, str):
        return base(value)
    if base is Any or base is list or (isinstance(value, base) and not (base is int and isinstance(value, bool))):
        return value
    kind = {int: "an integer", float: "a number", str: "text", bool: "true or false"}.get(base, str(base))
    raise InvalidSetting(f"{flag}: got {value!r}, expected {kind}", field=flag, value=value, expected=kind)


def _check_bounds(flag: str, meta: Mapping[str, Any], value: Any) -> None:
    if meta["choices"] and value not in meta["choices"]:
        near = difflib.get_close_matches(str(value), meta["choices"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InvalidSetting(
            f"{flag}: got {value!r}, expected one of {', '.join(meta['choices'])}{hint}", field=flag, value=value
        )
    for name, wrong, words in (
        ("minimum", lambda v, b: not v >= b, "at least"),
        ("above", lambda v, b: not v > b, "more than"),
        ("maximum", lambda v, b: not v <= b, "at most"),
    ):
        bound = meta[name]
        if bound is not None and wrong(value, bound):
            raise InvalidSetting(
                f"{flag}: got {value}, expected {words} {bound}", field=flag, value=value, expected=f"{words} {bound}"
            )
    if isinstance(value, int) and value.bit_length() > 63:
        raise InvalidSetting(
            f"{flag}: got {value}, expected an integer of 64 bits", field=flag, value=value, expected="64 bits"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidSetting(
            f"{flag}: got {value}, expected a finite number", field=flag, value=value, expected="a finite number"
        )
