"""The user's functions by path: "package.module.name", or "path/to/file.py:name".

    reward = load_plugin("my_rewards.py:exact", flag="--custom-rm-path", parameters=("args", "sample"))

A file without `:name` means its one public function; of several, the one that is called as the file is, or as such a
plug-in usually is (USUAL_NAMES). A path is loaded once a process.
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

from slime.types.errors import PluginError

_LOADING = threading.RLock()

# By flag: how a function of a file is called that has others beside it.
USUAL_NAMES = {
    "--buffer-filter-path": ("buffer_filter",),
    "--custom-generate-function-path": ("custom_generate", "generate"),
    "--custom-rm-path": ("reward_func", "custom_rm", "batched_custom_rm"),
    "--eval-function-path": ("eval_rollout", "generate_rollout"),
    "--rollout-function-path": ("generate_rollout",),
}


def load_plugin(
    path: str,
    *,
    flag: str = "",
    parameters: Sequence[str] = (),
    keywords: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Callable[..., Any]:
    """The callable at `path`.

    parameters: names of the positional arguments that it will be called with; empty: not checked.
    keywords: those that it will be called with by keyword.
    names: tried before USUAL_NAMES, for a file without `:name`.
    Raises PluginError naming `flag`, the path, and what is wrong with it.
    """
    module_path, name = _split(path, flag)
    module = (
        _load_file(Path(module_path), path, flag) if module_path.endswith(".py") else _import(module_path, path, flag)
    )
    if not name:
        name = _function_of_file(module, path, flag, names)
    try:
        function = getattr(module, name)
    except AttributeError:
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise _error(path, flag, f"{module_path} has no {name!r}", f"one of {', '.join(public[:8])}") from None
    if not callable(function):
        raise _error(path, flag, f"{name} is a {type(function).__name__}", "something callable")
    if parameters or keywords:
        _check_parameters(function, path, flag, parameters, keywords)
    return function


def _split(path: str, flag: str) -> tuple[str, str]:
    file, colon, name = path.rpartition(":")
    if colon and file.endswith(".py"):
        return file, name
    if path.endswith(".py"):
        return path, ""
    module, dot, name = path.rpartition(".")
    if not dot or not all(part.isidentifier() for part in path.split(".")):
        raise _error(path, flag, "it is not a path", '"package.module.name" or "path/to/file.py:name"')
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
    # Two files of one name must not replace each other in sys.modules.
    name = f"slime_plugin_{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}"
    with _LOADING:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, resolved)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # As for any import: a class of the file looks for its module while it is made, and pickle later.
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            # A script that ends by sys.exit() would end the program without a word.
            if not isinstance(error, (Exception, SystemExit)):
                raise
            raise _error(
                path, flag, f"loading it raised {type(error).__name__}: {error}", "a file that loads"
            ) from error
        return module


def _function_of_file(module: ModuleType, path: str, flag: str, names: Sequence[str]) -> str:
    own = [
        name for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
    if len(own) != 1:
        for name in (*names, Path(path).stem, *USUAL_NAMES.get(flag, ())):
            if name in own:
                return name
        found = ", ".join(own) or "none"
        raise _error(path, flag, f"the file defines {len(own)} public functions ({found})", f"one, or {path}:NAME")
    return own[0]


def _check_parameters(
    function: Callable[..., Any], path: str, flag: str, parameters: Sequence[str], keywords: Sequence[str]
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    try:
        signature.bind(*parameters, **dict.fromkeys(keywords))
    except TypeError:
        expected = ", ".join([*parameters, *(f"{name}=" for name in keywords)])
        raise _error(path, flag, f"it takes {signature}", f"({expected})") from None


def _error(path: str, flag: str, problem: str, expected: str) -> PluginError:
    prefix = f"{flag} " if flag else ""
    return PluginError(f"{prefix}{path}: {problem}, expected {expected}", field=flag, value=path, expected=expected)
