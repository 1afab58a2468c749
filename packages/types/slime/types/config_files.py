"""`--config` files: YAML in which each key occurs once, as its specification demands."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from slime.types.errors import InvalidFile, UnknownFlag, nearest
from slime.types.files import read_bounded


class _Loader(yaml.SafeLoader):
    """Refuses a key that occurs twice; PyYAML takes the last of several."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here, because the constructor expands "<<" into keys that the mapping does not contain.
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} occurs twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        # PyYAML lets errors of Python through: a month 13, more digits than `int` reads, `!!bool x`.
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Errors of other types speak of PyYAML's own code.
            reason = f": {error}" if isinstance(error, ValueError) else ""
            problem = f"cannot read a value as YAML's type {node.tag.rpartition(':')[2]}{reason}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def load(text: str) -> Any:
    """Reads plain values only, as `yaml.safe_load` does. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)


def read_config(path: str | Path, flag: str = "--config", expected: str = "a mapping of settings") -> dict[str, Any]:
    """Reads a YAML mapping, or an empty file; dashes in keys become underscores.

    flag: the one that named the file. expected: what the error for another kind of value asks for.
    Raises MissingFile; InvalidFile, also for a key that occurs twice.
    """
    try:
        data = load(read_bounded(path, flag).decode("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFile(f"{flag} {path}{_fault(error)}", field=flag, value=str(path), expected="YAML") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InvalidFile.must_be(f"{flag} {path}", expected, got=data)
    content: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name in content:
            raise InvalidFile(f"{flag} {path}: the key {name} occurs twice", field=name, expected="each setting once")
        content[name] = value
    return content


def _fault(error: Exception) -> str:
    """Words a fault as `, line 3: the key 'a' occurs twice`: its place, where that is known, and the problem."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f": not YAML: {error}"
    context = f" ({error.context})" if error.context else ""
    return f", line {error.problem_mark.line + 1}: {error.problem}{context}"


def unknown_key(key: str, known: Iterable[str], help_command: str, refused: Iterable[str] = ()) -> UnknownFlag:
    """Returns the error for a key of a file of settings.

    help_command: lists the settings, `slime train --help-all`. refused: known keys that would be an error, too.
    """
    names, refused = list(known), set(refused)
    near = nearest(key, names)
    listed = None if near and near not in refused else f"one of the settings that `{help_command}` lists"
    return UnknownFlag.unknown("key", key, names, refused=refused, instead=listed)
