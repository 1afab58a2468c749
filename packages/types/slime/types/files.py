"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from slime.types.directories import path_errors
from slime.types.errors import InvalidSetting


def check_file_place(path: Path, *, field: str = "path") -> None:
    """Raises InvalidSetting for a path at which something lies that is no regular file."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise InvalidSetting(
            f"{field}: {path} is no regular file; expected one, or nothing there",
            field=field, value=str(path), expected="a regular file, or nothing there",
        )  # fmt: skip


@contextmanager
def whole_file(path: Path, mode: str = "w", *, field: str = "path") -> Iterator[IO[Any]]:
    """Takes the place of `path` when the block ends well; until then, and else, `path` is as it was.

    The file is written beside it, under a name that nobody can foresee, and readable by all.
    Raises InvalidSetting where `path` is no regular file or takes none, OutOfSpace.
    """
    with path_errors(path, field):
        check_file_place(path, field=field)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(descriptor, mode) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise


def write_whole(path: Path, text: str, *, field: str = "path") -> None:
    """Replaces `path` by a file of this text, as `whole_file` does."""
    with whole_file(path, field=field) as file:
        file.write(text)
