"""Reads the flags of SGLang's server from the text of its `server_args.py`, without importing or running it.

    python -m slime.rollout.engines.sglang.read_flags SGLANG_WHEEL > server_flags.json

SGLang derives most flags from the fields of the dataclass `ServerArgs`, annotated `A[type, "help"]` or
`A[type, Arg(...)]` (its `arg_utils.add_cli_args_from_dataclass`), and adds the others one by one in
`ServerArgs.add_cli_args`. This module reads both.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SOURCE = "sglang/srt/server_args.py"

SCALARS = {"int", "float", "str"}


@dataclass(frozen=True)
class ServerFlag:
    """One flag of SGLang's server.

    name: without leading dashes. type: of a value, "int", "float", "bool", or "str", also for values that SGLang parses
    itself. nargs: as in argparse; 0 for a switch. choices: None if any value is valid, or if the choices are known only
    when SGLang runs. negated: whether there is a flag `--no-NAME` too.
    """

    name: str
    type: str = "str"
    nargs: int | str | None = None
    choices: tuple[Any, ...] | None = None
    aliases: tuple[str, ...] = ()
    negated: bool = False


def read_flags(source: str) -> list[ServerFlag]:
    """Returns the flags of a `server_args.py`, sorted by name. Raises ValueError if definitions are missing."""
    tree = ast.parse(source)
    constants = _Constants(tree)
    server_args = _find(tree.body, ast.ClassDef, "ServerArgs")
    flags: dict[str, ServerFlag] = {}
    for node in server_args.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            flag = _field_flag(node.target.id, node.annotation, constants)
            if flag is not None:
                flags[flag.name] = flag
    for call in ast.walk(_find(server_args.body, ast.FunctionDef, "add_cli_args")):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            flag = _added_flag(call, constants)
            flags[flag.name] = flag
    return [flags[name] for name in sorted(flags)]


class _Constants:
    """Literal values of the module's names, except lists and sets that the module extends elsewhere."""

    def __init__(self, tree: ast.Module) -> None:
        self._values: dict[str, Any] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._values[node.targets[0].id] = self.value(node.value)
        for call in ast.walk(tree):
            # X.append(...), X.add(...), X.extend(...): plug-ins may add backends of their own.
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                if call.func.attr in ("append", "add", "extend") and isinstance(call.func.value, ast.Name):
                    self._values.pop(call.func.value.id, None)

    def value(self, node: ast.expr) -> Any:
        """Returns the value of a literal or of a name for one, None for any other expression."""
        if isinstance(node, ast.Name):
            return self._values.get(node.id)
        try:
            return ast.literal_eval(node)
        except ValueError:
            return None

    def choices(self, node: ast.expr | None) -> tuple[Any, ...] | None:
        found = None if node is None else self.value(node)
        return tuple(found) if isinstance(found, (list, tuple)) else None


def _find(nodes: list[ast.stmt], kind: Any, name: str) -> Any:
    for node in nodes:
        if isinstance(node, kind) and node.name == name:  # type: ignore[attr-defined]
            return node
    raise ValueError(f"no {name} in this server_args.py")


def _field_flag(name: str, annotation: ast.expr, constants: _Constants) -> ServerFlag | None:
    """Returns the flag of one field, by the rules of `add_cli_args_from_dataclass`; None for a field without one."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated")):
        return None
    kind, *metadata = annotation.slice.elts  # type: ignore[attr-defined]
    calls = [node for node in metadata if isinstance(node, ast.Call) and ast.unparse(node.func) == "Arg"]
    others = [node for node in metadata if not isinstance(node, ast.Call)]  # a bare help text
    if not calls and not others:
        return None
    keywords = {keyword.arg: keyword.value for keyword in calls[0].keywords if keyword.arg} if calls else {}
    if "no_cli" in keywords:
        return None
    return ServerFlag(
        name=(constants.value(keywords["cli_name"]) if "cli_name" in keywords else "--" + name.replace("_", "-"))[2:],
        aliases=tuple(alias[2:] for alias in constants.choices(keywords.get("aliases")) or ()),
        **_shape(_without_optional(kind), keywords, constants),
    )


def _shape(kind: ast.expr, given: dict[str, ast.expr], constants: _Constants) -> dict[str, Any]:
    """Returns type, nargs, choices and negation of a field of this type."""
    choices = constants.choices(given.get("choices"))
    if "action" in given:
        if ast.unparse(given["action"]).endswith("BooleanOptionalAction"):
            return {"type": "bool", "nargs": 0, "negated": True}
        extra = constants.value(given["action_kwargs"]) if "action_kwargs" in given else None
        if extra is None and "action_kwargs" in given:
            extra = _literals(given["action_kwargs"], constants)
        return {"nargs": (extra or {}).get("nargs")}
    nargs = constants.value(given["nargs"]) if "nargs" in given else None
    text = ast.unparse(kind)
    if isinstance(kind, ast.Subscript) and text.startswith("Literal["):
        literals = [node.value for node in _elements(kind) if isinstance(node, ast.Constant)]
        scalar = type(literals[0]).__name__ if literals else "str"
        # A list of choices in addition to a Literal means that the list may grow.
        return {
            "type": scalar if scalar in SCALARS else "str",
            "choices": choices if "choices" in given else tuple(literals),
        }
    if isinstance(kind, ast.Subscript) and text.startswith(("List[", "list[")) and "type_parser" not in given:
        return {"type": _scalar(_elements(kind)[0]), "nargs": nargs or "+", "choices": choices}
    if text == "bool":
        return {"type": "bool", "nargs": 0}
    scalar = "str" if "type_parser" in given else _scalar(kind)
    return {"type": scalar, "nargs": nargs, "choices": choices}


def _added_flag(call: ast.Call, constants: _Constants) -> ServerFlag:
    """Returns the flag of one `parser.add_argument(...)`."""
    names = [str(node.value)[2:] for node in call.args if isinstance(node, ast.Constant)]
    keywords = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    action = ast.unparse(keywords["action"]).strip("'\"").rsplit(".", 1)[-1] if "action" in keywords else "store"
    common: dict[str, Any] = {"name": names[0], "aliases": tuple(names[1:])}
    if action in ("store_true", "DeprecatedAction", "DeprecatedStoreTrueAction", "DeprecatedStoreConstAction"):
        return ServerFlag(type="bool", nargs=0, **common)
    scalar = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    return ServerFlag(
        type=scalar if scalar in SCALARS else "str",
        nargs=constants.value(keywords["nargs"]) if "nargs" in keywords else None,
        choices=constants.choices(keywords.get("choices")),
        **common,
    )


def _literals(node: ast.expr, constants: _Constants) -> dict[str, Any]:
    """Returns the literal entries of a dict display."""
    assert isinstance(node, ast.Dict)
    pairs = zip(node.keys, node.values, strict=True)
    return {str(key.value): constants.value(value) for key, value in pairs if isinstance(key, ast.Constant)}


def _without_optional(kind: ast.expr) -> ast.expr:
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Optional":
        return kind.slice
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr):
        return kind.left if ast.unparse(kind.right) == "None" else kind.right
    return kind


def _elements(kind: ast.Subscript) -> list[ast.expr]:
    return kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]


def _scalar(kind: ast.expr) -> str:
    text = ast.unparse(kind)
    return text if text in SCALARS else "str"


def main() -> int:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        source = wheel.read(SOURCE).decode()
    version = Path(sys.argv[1]).name.split("-")[1]
    lines = [
        json.dumps({k: v for k, v in asdict(flag).items() if v is not None and v is not False and v != ()})
        for flag in read_flags(source)
    ]
    print(f'{{"version": {json.dumps(version)}, "flags": [\n' + ",\n".join(lines) + "\n]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
