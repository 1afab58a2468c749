"""JSON in `*_json` fields: a value without a JSON form is refused with its path, never approximated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from slime.types.errors import InvalidField

_MAX_DEPTH = 100
SHALLOW = f"at most {_MAX_DEPTH} levels"
# Types that are written as they are.
_SCALARS = frozenset({str, int, float, bool, type(None)})
encode_plain = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


def to_json(value: Any, path: str) -> str:
    """Encodes one JSON value; NaN and infinities are written as `NaN` and `Infinity`. Raises what `plain` raises."""
    return encode_plain(plain(value, path))


def plain(value: Any, path: str, depth: int = 0) -> Any:
    """Returns `value` in types that JSON has: numpy scalars become Python numbers, tuples become lists.

    Raises InvalidField naming the path ("metadata.turns[3]") of a value without a JSON form, of a dict with a key that
    is not text, or of a tree that is too deep.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if depth > _MAX_DEPTH:
        raise InvalidField(path, "a deeper tree", SHALLOW)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise InvalidField(path, key, "text as the key of a dict")
        return {str(key): plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if _SCALARS.issuperset(map(type, value)):
            return list(value)
        return [plain(item, f"{path}[{position}]", depth + 1) for position, item in enumerate(value)]
    if isinstance(value, np.generic):
        return plain(value.item(), path, depth + 1)
    for scalar in (bool, int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    raise InvalidField(path, value, f"a JSON value, not {kind.__name__}")


def from_json(text: str, path: str, kind: type | None = None, *, outer_levels: int = 0) -> Any:
    """Decodes `text` to a value of type `kind` (None: any), nested no deeper than `to_json` writes it.

    outer_levels: levels around a value of `to_json`.
    """
    try:
        value = _decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(path, text, f"JSON ({error})") from None
    if kind is not None and not isinstance(value, kind):
        raise InvalidField(path, text, "a JSON object" if kind is dict else "a JSON list")
    if text.count("[") + text.count("{") > _MAX_DEPTH and too_deep(value, outer_levels=outer_levels):
        raise InvalidField(path, "a deeper tree", SHALLOW)
    return value


def too_deep(value: Any, *, outer_levels: int = 0) -> bool:
    """Tells whether a JSON value is nested deeper than `to_json` writes it."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1 + outer_levels):
        level = [item for tree in level for item in _items(tree)]
        if not level:
            return False
    return any(isinstance(item, (dict, list)) for item in level)


def _items(tree: Any) -> Iterable[Any]:
    return tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()


def is_utf8(value: Any) -> bool:
    """Returns whether UTF-8 can hold the text in a JSON value; it cannot hold JSON's \\ud800."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
