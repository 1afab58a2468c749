"""Files that `train` writes for a run: below `inputs` in its output directory, and never over those of another run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.config.record import SETTINGS
from slime.launcher.run_directory.state import read_state
from slime.types.errors import InvalidSetting
from slime.types.files import write_whole


@dataclass(frozen=True)
class Inputs:
    """The input files of a run. directory: of the files. replace: a file with other content is replaced, and not
    refused."""

    directory: Path
    replace: bool = True

    @classmethod
    def of_run(cls, output: Path, *, overwrite: bool) -> Inputs:
        """Returns the inputs of a run. overwrite: replaces the files of a run that has ended; those of one that is
        alive are in use."""
        replace = not (output / SETTINGS).exists() or (overwrite and read_state(output).state != "running")
        return cls(output / "inputs", replace)

    def write(self, name: str, text: str, argument: str) -> Path:
        """Writes a file for an argument of `train`. Raises InvalidSetting where that would change those of a run."""
        path = self.directory / name
        if not self.replace and path.is_file() and path.read_text(encoding="utf-8") != text:
            raise InvalidSetting(
                f"output_dir: {path} is of another run, with another {argument}; use another output_dir, or "
                "overwrite=True once that run has ended",
                field="output_dir", value=str(path), expected="another directory",
            )  # fmt: skip
        self.directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, field="output_dir")
        return path

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]], argument: str) -> Path:
        """Writes rows as JSON lines. Raises InvalidSetting also for what JSON cannot hold."""
        try:
            text = "".join(json.dumps(dict(row), default=_plain) + "\n" for row in rows)
        except (TypeError, ValueError) as error:
            raise InvalidSetting.must_be(
                argument, "a file, a name on the Hub, or rows that JSON can hold", got=rows, reason=str(error)
            ) from None
        return self.write(name, text, argument)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as a file has them: paths as text, numbers of numpy as Python's. Raises InvalidSetting."""
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
    if hasattr(value, "tolist"):  # numbers and arrays of numpy
        return value.tolist()
    raise TypeError(f"no file of settings holds a {type(value).__name__}")
