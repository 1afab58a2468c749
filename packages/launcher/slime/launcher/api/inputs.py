"""Writes the input files of a run to `inputs` in its output directory, and never over the files of another run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.config.record import SETTINGS
from slime.launcher.run_directory.state import read_state
from slime.types.directories import path_errors
from slime.types.errors import InvalidSetting
from slime.types.files import write_whole


@dataclass(frozen=True)
class Inputs:
    """The input files of a run.

    directory: holds the files. replace: whether a file with other content is replaced; otherwise it is an error.
    """

    directory: Path
    replace: bool = True

    @classmethod
    def of_run(cls, output: Path, *, overwrite: bool) -> Inputs:
        """Returns the inputs of the run in `output`.

        overwrite: replaces the files of an earlier run that has ended; a run that is alive still uses its files.
        """
        replace = not (output / SETTINGS).exists() or (overwrite and read_state(output).state != "running")
        return cls(output / "inputs", replace)

    @contextlib.contextmanager
    def removed_on_error(self) -> Iterator[None]:
        """Removes the inputs on an error, and their directory if it is empty then; not if it was there before."""
        is_new = not self.directory.parent.exists()
        try:
            yield
        except BaseException:
            if is_new:
                shutil.rmtree(self.directory, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self.directory.parent.rmdir()
            raise

    def write(self, name: str, text: str, argument: str) -> Path:
        """Writes a file for an argument of `train`. Raises InvalidSetting if it would replace one of another run."""
        path = self.directory / name
        if not self.replace and path.is_file() and path.read_text(encoding="utf-8") != text:
            raise InvalidSetting(
                f"output_dir: {path} belongs to another run, with another {argument}; use another output_dir, or "
                "overwrite=True once that run has ended",
                field="output_dir", value=str(path), expected="another directory",
            )  # fmt: skip
        with path_errors(path, "output_dir"):
            self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, field="output_dir")
        return path

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]], argument: str) -> Path:
        """Writes rows as JSON lines. Raises InvalidSetting as `write` does, and for values that JSON cannot hold."""
        try:
            text = "".join(json.dumps(dict(row), default=_plain) + "\n" for row in rows)
        except (TypeError, ValueError) as error:
            raise InvalidSetting.must_be(
                argument, "a file, a name on the Hub, or rows that JSON can hold", got=rows, reason=str(error)
            ) from None
        return self.write(name, text, argument)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as plain JSON values: paths as text, NumPy numbers as Python's. Raises InvalidSetting for
    others."""
    plain = {}
    for name, value in settings.items():
        try:
            plain[name] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError) as error:
            raise InvalidSetting(f"{name}: {error}", field=name, expected="text, numbers, or lists of them") from None
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # NumPy numbers and arrays
        return value.tolist()
    raise TypeError(f"a file of settings cannot hold a {type(value).__name__}")
