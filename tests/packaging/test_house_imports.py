"""Holds what modules import: no circles, no small modules for one importer, no engines that are known by their name."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter

import pytest
from house_tree import MODULES, OTHER_CODE, ROOT, imported, parsed, scripts

NUM_GPUS = 0
# A module of at most so many lines that fewer than two others import belongs into its importer or a sibling.
SLIP_LINES = 45
# Kinds of such modules that stand alone all the same.
SLIPS = {
    "slime.converters.families.*": "one for each model family, a row in the table of the folder",
    "slime.rollout.rewards.built_in.*": "one for each reward, a row in registry.py",
    "slime.launcher.doctor.*": "one for each check, a row in the table of command.py",
    "slime.launcher.metrics.sinks.*": "one for each tracker, a row in registry.py",
    "slime.launcher.quickstart.*": "one for each task, whose reward a command names by its path",
    "slime.launcher.cli.template.*": "files of the project that `slime init` writes",
}
# Folders side by side that import each other, and why. No new ones.
TWO_WAYS = {
    (
        "slime.rollout.agents",
        "slime.rollout.generate",
    ): "an agent's episodes make a group, of what a rollout knows",
}
# Paths by which code written for slime imports: these take over names of ours.
SHIMS = {
    name for name, path in MODULES.items() if (ast.get_docstring(parsed(path)) or "").startswith("Compatibility: ")
}
MAX_SHIM_LINES = 8
# Shims that do more than to take over or to adapt: nothing of ours needs what they offer to plug-ins.
SHIMS_WITH_CODE = {
    "slime.rollout.sample_hooks": "applies hooks in a rollout function of the user; ours get them by the state",
    "slime.utils.async_utils": "an event loop for functions that have none; ours run on the loop of a service",
    "slime.utils.data": "prompt files as one list of samples; ours are read by the buffer, as an endless sequence",
    "slime.utils.external_utils.command_utils": "makes commands of `slime train` for scripts in Python",
    "slime.utils.http_utils": "retries a request for hours, as plug-ins expect; ours have a deadline",
    "slime.utils.misc": "a metaclass that classes of plug-ins have",
}


def importers() -> Counter[str]:
    """Counts the files that import each module, be it by a name that its package takes over from it."""
    taken_over = {
        f"{package}.{alias.asname or alias.name}": node.module
        for package, path in MODULES.items()
        if path.stem == "__init__"
        for node in parsed(path).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    count: Counter[str] = Counter()
    for path in [*MODULES.values(), *scripts()]:
        found = set()
        for node in ast.walk(parsed(path)) if path.stem != "__init__" else ():
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {node.module} | names | {taken_over.get(name) for name in names}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        count.update(found & MODULES.keys())
    return count


def test_a_small_module_has_more_than_one_importer() -> None:
    used = importers()
    slips = {
        name
        for name, path in MODULES.items()
        # `kind` of an engine is a row in the table of the folder.
        if path.stem not in ("__init__", "__main__", "kind")
        and name not in SHIMS
        and used[name] < 2
        and len(path.read_text(encoding="utf-8").splitlines()) <= SLIP_LINES
    }
    alone = {name for name in slips for kind in SLIPS if fnmatchcase(name, kind)}
    assert slips == alone, "merge it into its importer or a sibling, or name its kind in SLIPS, with the reason"
    for kind in SLIPS:
        assert any(fnmatchcase(name, kind) for name in slips), f"no module needs {kind} in SLIPS any more"


def test_no_imports_run_in_a_circle() -> None:
    """A package's `__init__` is left out: what it offers lazily under a short name imports the package itself."""
    graph = {name: imported(name) for name, path in MODULES.items() if path.stem != "__init__"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def lengths(tree: ast.Module) -> Iterator[int]:
    """Yields the lines of the functions of a module, docstrings left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield sum((line.end_lineno or line.lineno) - line.lineno + 1 for line in body)


def test_a_compatibility_path_takes_over_what_is_ours() -> None:
    """Its code is in a module with the name of what it does."""
    with_code = {
        name
        for name in SHIMS
        if any(isinstance(node, ast.ClassDef) for node in ast.walk(parsed(MODULES[name])))
        or max(lengths(parsed(MODULES[name])), default=0) > MAX_SHIM_LINES
    }
    assert len(SHIMS) > 25
    assert with_code == SHIMS_WITH_CODE.keys(), "move the code, or say in SHIMS_WITH_CODE why it is there"


def test_no_module_of_ours_imports_by_a_compatibility_path() -> None:
    wrong = {name: sorted(imported(name) & SHIMS) for name in MODULES.keys() - SHIMS if imported(name) & SHIMS}
    assert wrong == {}


# Words of other tables that an engine is named in, too: a package, and who teaches.
OTHER_NAMES = ("wanted", "installed", "args['opd_type']", "self.opd_type")


def told_by_name(tree: ast.Module, kinds: set[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, code) where behaviour depends on the name of a kind of engine: ==, in, match, keys of a table."""
    for node in ast.walk(tree):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Dict):
            parts = list(node.keys)
        if any(part is not None and ast.unparse(part) in OTHER_NAMES for part in parts):
            continue
        words = [word for part in parts if part is not None for word in [part, *getattr(part, "elts", [])]]
        if any(isinstance(word, ast.Constant) and word.value in kinds for word in words):
            yield getattr(node, "lineno", 1), ast.unparse(node)


def test_behaviour_depends_on_what_an_engine_can_do_and_not_on_its_name() -> None:
    """The abilities of a kind are in its `kind.py`, and on the wire; its own folder and the registry may name it."""
    own = "slime.rollout.engines."
    kinds = {
        str(node.value.value)
        for name, path in MODULES.items()
        if name.startswith(own) and path.stem == "kind"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "name"
        if isinstance(node.value, ast.Constant)
    }
    assert kinds >= {"sglang", "embedded"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {code}"
        for name, path in MODULES.items()
        if not name.startswith(own)
        for line, code in told_by_name(parsed(path), kinds)
    ]
    assert wrong == []
    asked = "e.kind == 'sglang'; e.kind in ('a', 'embedded'); {'sglang': 400}[e.kind]"
    asked += "\nmatch e.kind:\n    case 'sglang': pass"
    assert len(list(told_by_name(ast.parse(asked), kinds))) == 4


def side_by_side(name: str, other: str) -> tuple[str, str] | None:
    """Returns the folders, of one folder, in which two modules are; None where one is above the other."""
    folders = [
        (module if MODULES[module].stem == "__init__" else module.rpartition(".")[0]).split(".")
        for module in (name, other)
    ]
    for depth, parts in enumerate(zip(*folders, strict=False), start=1):
        if parts[0] != parts[1]:
            return ".".join(folders[0][:depth]), ".".join(folders[1][:depth])
    return None


def test_no_more_folders_side_by_side_import_each_other() -> None:
    arrows = {side_by_side(name, other) for name in MODULES for other in imported(name)} - {None}
    pairs = {tuple(sorted(arrow)) for arrow in arrows if arrow is not None and arrow[::-1] in arrows}
    assert pairs == TWO_WAYS.keys()


def test_the_args_of_the_rollout_have_a_type() -> None:
    """With Any, mypy would not check the names that are read from them."""
    untyped = {
        f"{name}:{node.lineno}"
        for name, path in MODULES.items()
        if path.is_relative_to(ROOT / "packages/rollout")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if argument.arg == "args" and isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Any"
    }
    assert untyped == set()


def test_helpers_are_sorted_the_same_whichever_files_ruff_sees() -> None:
    """Pants shows ruff some files at a time: a helper that is not among them is ours only where it is named."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]
    roots = [folder for pattern in ruff["src"] for folder in ROOT.glob(pattern) if folder.is_dir()]
    helpers = {path.stem for folder in roots for path in folder.glob("*.py")}
    unnamed = {
        name
        for path in OTHER_CODE
        for node in parsed(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name in helpers
    } - set(ruff["lint"]["isort"]["known-first-party"])
    assert len(helpers) > 40
    assert unnamed == set(), "name it in known-first-party in pyproject.toml"
