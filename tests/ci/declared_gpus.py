"""Number of GPUs that a test file asks for, and the command that runs it.

A test says so by a constant at its top, `NUM_GPUS = 4`. One that says nothing gets 8 under `tests/`, where the tests of
whole runs are, and 0 where tests never need one: in `packages/*/tests` and in `tests/e2e`.
"""

from __future__ import annotations

import ast
import sys
from fnmatch import fnmatchcase

DEFAULT = 8
# Here * also matches "/": the folders below count.
ON_A_CPU = ("packages/*/tests/*", "tests/e2e/*")


class NotANumber(ValueError):
    """NUM_GPUS is there and is not a plain number of GPUs."""


def num_gpus(path: str, source: str | bytes) -> int:
    """path: relative to the repository. source: as bytes it may say how it is encoded.

    Raises NotANumber; a file that does not parse has the default, and fails as soon as it is run.
    """
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        print(f"{path}:{error.lineno}: {error.msg}; taking the default for NUM_GPUS", file=sys.stderr)
        return default(path)
    for statement in module.body:
        value = _assigned(statement)
        if value is None:
            continue
        number = value.value if isinstance(value, ast.Constant) else None
        if not isinstance(number, int) or isinstance(number, bool):
            raise NotANumber(f"{path}:{statement.lineno}: NUM_GPUS = {ast.unparse(value)}, expected a number such as 4")
        return number
    return default(path)


def default(path: str) -> int:
    return 0 if any(fnmatchcase(path, pattern) for pattern in ON_A_CPU) else DEFAULT


def _assigned(statement: ast.stmt) -> ast.expr | None:
    """Returns the value that a statement assigns to NUM_GPUS."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    else:
        return None
    named = any(isinstance(target, ast.Name) and target.id == "NUM_GPUS" for target in targets)
    return statement.value if named else None


def runs_directly(source: str | bytes) -> bool:
    """Tells if `python FILE` runs the tests of a file; one without `if __name__ == "__main__"` would do nothing."""
    return any(
        isinstance(statement, ast.If)
        and "__name__" in {n.id for n in ast.walk(statement.test) if isinstance(n, ast.Name)}
        for statement in ast.parse(source).body
    )


def command(path: str, gpus: int, directly: bool, arguments: tuple[str, ...] = ()) -> list[str]:
    run = ["python", path] if directly else ["python", "-m", "pytest", path]
    lock = ["python", "tests/ci/gpu_lock_exec.py", "--count", str(gpus), "--"] if gpus else []
    return [*lock, *run, *arguments]
