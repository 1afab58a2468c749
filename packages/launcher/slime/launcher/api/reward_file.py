"""Puts a reward function of a script or a notebook into a file that other processes can load.

A function of a module is named by the path of its file. Loading the file of a script would run the script again, and a
notebook has no file: their functions are written to a new file, with the imports, functions, classes and plain values
that they use.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from slime.launcher.api.inputs import Inputs
from slime.types.errors import InvalidSetting

HEADER = (
    '"""The reward function of a run, written by `slime.launcher.train`."""\n\nfrom __future__ import annotations\n'
)
ELSE = "put the reward into a file, and give its path, FILE.py:FUNCTION"
LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def reward_path(function: Callable[..., Any], inputs: Inputs) -> str:
    """Returns the path of a reward function as --custom-rm-path takes it; writes reward.py if needed.

    Raises InvalidSetting for a function that cannot be shipped, with the reason.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not isinstance(function, FunctionType) or name == "<lambda>":
        raise InvalidSetting.must_be("reward", "a function with a name (def)", got=name, reason=ELSE)
    if function.__code__.co_freevars:
        captured = ", ".join(function.__code__.co_freevars)
        raise _cannot_ship(name, f"it uses {captured} of the function around it; move it out of there")
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if module is not None and file and module.__name__ != "__main__" and getattr(module, name, None) is function:
        return f"{module.__name__}.{name}" if module.__package__ else f"{Path(file).absolute()}:{name}"
    parts: dict[str, str] = {}
    _collect(name, function, name, parts)
    path = inputs.write("reward.py", "\n\n".join([HEADER, *parts.values()]), "reward")
    return f"{path.absolute()}:{name}"


def _collect(name: str, value: Any, reward: str, parts: dict[str, str]) -> None:
    """Adds the statement that defines `name`, after the statements of all names that it uses."""
    if name in parts:
        return
    inner = inspect.unwrap(value) if callable(value) else value
    origin = getattr(inner, "__name__", None)
    of_module = getattr(inner, "__module__", None)
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}\n"
    elif isinstance(inner, (FunctionType, type)) and of_module == "__main__":
        if isinstance(origin, str) and origin not in (name, "<lambda>") and _namespace(inner).get(origin) is value:
            _collect(origin, value, reward, parts)
            parts[name] = f"{name} = {origin}\n"
            return
        parts[name] = ""  # ends the recursion where functions call each other
        source = _source(name, inner, reward)
        if not _defines(source, name, inner, wrapped=inner is not value):
            raise _cannot_ship(reward, f"it uses {name}, which no def or class of that name defines; write it as one")
        for used in _globals_of(inner, source):
            if used in _namespace(inner):
                _collect(used, _namespace(inner)[used], reward, parts)
        del parts[name]
        parts[name] = source
    elif (
        callable(value) and isinstance(origin, str) and getattr(sys.modules.get(str(of_module)), origin, None) is value
    ):
        parts[name] = f"from {of_module} import {origin} as {name}\n"
    elif isinstance(value, re.Pattern):
        parts[name] = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})\n"
    elif _is_literal(value):
        parts[name] = f"{name} = {value!r}\n"
    else:
        raise _cannot_ship(reward, f"it uses {name}, a {type(value).__name__}; create it inside the function")


def _namespace(thing: Any) -> dict[str, Any]:
    return thing.__globals__ if isinstance(thing, FunctionType) else vars(sys.modules[thing.__module__])


def _source(name: str, thing: Any, reward: str) -> str:
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        raise _cannot_ship(reward, f"the source of {name} is unknown here") from None


def _defines(source: str, name: str, thing: Any, *, wrapped: bool) -> bool:
    """Returns whether `source`, the source of `thing`, defines `name`.

    wrapped: the name stands for `thing` wrapped by decorators, which then must be in the source.
    """
    try:
        (statement,) = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    if isinstance(statement, ast.Assign):  # of a lambda
        return not wrapped and [t.id for t in statement.targets if isinstance(t, ast.Name)] == [name]
    if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or statement.name != name:
        return False
    outer = isinstance(thing, FunctionType) and thing.__code__.co_freevars
    return not outer and (bool(statement.decorator_list) or not wrapped)


def _globals_of(thing: Any, source: str) -> list[str]:
    """Returns the names that a function or class takes from its module: also in decorators, defaults and bases."""
    tree = ast.parse(source).body[0]
    if isinstance(thing, type) or not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    around = [*tree.decorator_list, *tree.args.defaults, *filter(None, tree.args.kw_defaults)]
    names = [node.id for part in around for node in ast.walk(part) if isinstance(node, ast.Name)]
    return [*names, *_names(thing.__code__)]


def _names(code: CodeType) -> Iterator[str]:
    # co_names also lists attributes, which may share their name with something in the module.
    for instruction in dis.get_instructions(code):
        if instruction.opname in LOADS_GLOBAL:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_literal(value: Any) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _cannot_ship(name: str, reason: str) -> InvalidSetting:
    return InvalidSetting(
        f"the reward function {name} cannot be shipped to the processes of the run: {reason}; or {ELSE}",
        field="reward", value=name, expected="a function that a file can hold",
    )  # fmt: skip
