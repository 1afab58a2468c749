"""User functions by path: "package.module.name", or "path/to/file.py:name".

    reward = load_plugin("my_rewards.py:exact", flag="--custom-rm-path")

A file without `:name` stands for its only public function; if it has several, for the one named like the file, or named
as such a plug-in usually is. Each path is loaded once per process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.types.errors import PluginError, counted, nearest
from slime.types.plugin_contracts import CONTRACTS
from slime.types.setting_values import flag_name

_LOADING = threading.RLock()


def load_plugin(path: str, *, flag: str, label: str = "", names: Sequence[str] = ()) -> Callable[..., Any]:
    """Loads the function at `path` and checks it against the contract of `flag` (see `plugin_contracts`).

    label: how errors name the setting (default: the flag). names: names of functions to try before the usual ones, for
    a file without `:name`. Raises PluginError naming the setting, the path and the problem.
    """
    contract = CONTRACTS[flag]
    setting = label or flag
    function = find_function(path, flag=setting, names=names, usual=contract.names)
    function = getattr(function, contract.constructor or "", None) or function
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        problem = f"it has a `yield`, and so returns a generator and not {contract.returns}"
        raise _error(path, setting, problem, "a function with `return`")
    if not contract.fits(function):
        problem = f"it takes {inspect.signature(function)}, but is called with {contract} to return {contract.returns}"
        raise _error(path, setting, problem, str(contract))
    return function


def load_setting(settings: Any, name: str) -> Callable[..., Any] | None:
    """Loads the function of the setting `name`; None if it is not set. Raises PluginError."""
    path = getattr(settings, name, None)
    return load_plugin(path, flag=flag_name(name)) if path else None


def find_function(
    path: str, *, flag: str = "", names: Sequence[str] = (), usual: Sequence[str] = ()
) -> Callable[..., Any]:
    """Loads the callable at `path`, whatever arguments it takes.

    In a file that defines several: one of `names`, else the function named like the file, else one of `usual`.
    Raises PluginError naming `flag`.
    """
    module_path, name = _split(path, flag)
    module = (
        _load_file(Path(module_path), path, flag) if module_path.endswith(".py") else _import(module_path, path, flag)
    )
    if not name:
        name = _function_of_file(module, path, flag, (*names, Path(module_path).stem, *usual))
    try:
        function = getattr(module, name)
    except AttributeError:
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        near = nearest(name, public)
        hint = f"did you mean {near}?" if near else f"it has {', '.join(public[:8]) or 'no functions'}"
        raise _error(path, flag, f"{module_path} has no {name!r}; {hint}", near or ", ".join(public[:8])) from None
    if not callable(function):
        raise _error(path, flag, f"{name} is a value of type {type(function).__name__}, not a function", "a function")
    return function


def _split(path: str, flag: str) -> tuple[str, str]:
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        return file, name
    if path.endswith(".py"):
        return path, ""
    module, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        forms = "package.module.name or path/to/file.py:name"
        raise _error(path, flag, f"it is not of the form {forms}", forms)
    return module, name


def _import(module: str, path: str, flag: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise _error(path, flag, f"no module named {error.name!r}", "an importable module") from error
    except (Exception, SystemExit) as error:
        raise _error(
            path, flag, f"importing {module} raised {type(error).__name__}: {error}", "an importable module"
        ) from error


def _load_file(file: Path, path: str, flag: str) -> ModuleType:
    if not file.is_file():
        raise _error(path, flag, f"no such file {file}", "an existing .py file")
    resolved = file.resolve()
    # Two files of the same name must not replace each other in sys.modules.
    name = f"slime_plugin_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    with _LOADING:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, resolved)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Registered as any import is: classes look up their module while they are defined, and pickle does later.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            # A script that calls sys.exit() would end the program silently.
            if not isinstance(error, (Exception, SystemExit)):
                raise
            raise _error(
                path, flag, f"loading it raised {type(error).__name__}: {error}", "a file that loads"
            ) from error
        return module


def _function_of_file(module: ModuleType, path: str, flag: str, names: Sequence[str]) -> str:
    callables = [
        name for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
    if len(callables) != 1:
        for name in names:
            if name in callables:
                return name
        listing = ", ".join(callables) or "none"
        raise _error(
            path,
            flag,
            f"the file defines {counted(len(callables), 'public function')} ({listing}); name one: {path}:NAME",
            f"{path}:NAME",
        )
    return callables[0]


def _error(path: str, flag: str, problem: str, expected: str) -> PluginError:
    prefix = f"{flag} " if flag else ""
    return PluginError(f"{prefix}{path}: {problem}", field=flag, value=path, expected=expected)
