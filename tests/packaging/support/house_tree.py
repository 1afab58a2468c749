"""The source tree as its tests read it: modules by name, other code, and what imports what."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_MODULES = 15


def modules() -> dict[str, Path]:
    """Maps the dotted names of hand-written modules of all packages to their files."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for package in sorted((ROOT / "packages").iterdir())
        for path in sorted(package.glob("slime/**/*.py"))
        if "v1" not in path.parts
    }


def scripts() -> list[Path]:
    folders = ("benchmarks", "examples", "scripts", "tools")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


MODULES = modules()
OTHER_CODE = [
    path
    for folder in ("packages/*/tests", "tests", "benchmarks", "examples", "scripts")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
]


def modules_by_folder(paths: Iterable[Path]) -> Counter[Path]:
    """Counts the modules of each folder, `__init__` and `__main__` left out."""
    return Counter(path.parent for path in set(paths) if path.stem not in ("__init__", "__main__"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(name: str) -> set[str]:
    """Modules of ours that module `name` imports when it runs, at its top or inside a function."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found.update(whole)
            if len(whole) < len(node.names) and node.module in MODULES:
                found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update({alias.name for alias in node.names} & MODULES.keys())
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(MODULES[name]))
    return found - {name}
