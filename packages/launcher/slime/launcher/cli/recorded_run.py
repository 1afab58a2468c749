"""`RecordedRun`: a run as its directory describes it, for commands that start from an earlier run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slime.converters.files.adapter import ADAPTER_DIR, has_adapter
from slime.launcher.config.record import COMMAND, SETTINGS
from slime.launcher.run_directory.checkpoints import find_checkpoint, steps
from slime.launcher.run_directory.earlier_run import MODEL
from slime.types.config_files import load, read_config
from slime.types.errors import InvalidFile, MissingFile, NotAvailable
from slime.types.files import read_regular

# The heading that `config.record` writes above each command.
_STARTED_IN = re.compile(r"^# \S+ \S+ \S+, in (?P<directory>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class RecordedRun:
    """A run as its directory describes it.

    path: absolute path of the run. settings: the settings that were set, by name. started_in: the directory that
    relative paths in the settings refer to. run_name: None if the run was not named.
    """

    path: Path
    settings: dict[str, Any]
    started_in: Path
    run_name: str | None

    @property
    def checkpoints(self) -> Path:
        return self.started_in / self.settings["save"] if self.settings.get("save") else self.path / "checkpoints"

    @property
    def why_unsaved(self) -> str:
        """Says why a run that has not finished has no checkpoint."""
        every = self.settings.get("save_interval")
        return f"it ended before iteration {every}, the first to be saved" if every else "it had no --save-interval"

    def began_with(self) -> str | None:
        """Returns the model that the run started from: an absolute path, or a name on the Hub."""
        text = self.settings.get("hf_checkpoint")
        here = self.started_in / str(text)
        return str(here) if text is not None and here.exists() else text

    def absolute(self, name: str, value: Any) -> Any:
        """Returns the value of a setting with its relative paths made absolute."""
        if name == "eval_prompt_data":
            return [[self._path(word) if i % 2 or len(pairs) == 1 else word for i, word in enumerate(pairs)]
                    for pairs in ([item] if isinstance(item, str) else item for item in value)]  # fmt: skip
        if isinstance(value, str) and (name.endswith(("_path", "_file", "_config", "_dir"))):
            return self._path(value)
        return value

    def _path(self, text: str) -> str:
        """Makes `PATH`, `PATH@[a:b]` or `PATH.py:FUNCTION` absolute if PATH exists; otherwise it is a name."""
        path = text.partition("@[")[0]
        path = path if (self.started_in / path).exists() else path.rpartition(":")[0]
        return str(self.started_in / text) if path and (self.started_in / path).exists() else text

    def model(self, step: int | None = None) -> Path:
        """Returns the trained model, else the newest checkpoint; with `step`, its checkpoint. Raises MissingFile."""
        if step is None and (self.path / MODEL).is_dir():
            return self.path / MODEL
        found = self._checkpoint(step)
        if has_adapter(found):
            raise NotAvailable.unavailable(
                f"{found} as a model", "it holds a LoRA adapter, without the weights under it",
                f"`slime export --format adapter`, or the trained model that `slime resume {self.path}` writes at its "
                "end, which is merged",
            ).at("RUN")  # fmt: skip
        return found

    def adapter(self, step: int | None = None) -> Path:
        """Returns the directory of the LoRA adapter that belongs to `model(step)`; without one, that of a model."""
        if step is None and (self.path / MODEL).is_dir():
            return self.path / MODEL / ADAPTER_DIR
        return self._checkpoint(step)

    def _checkpoint(self, step: int | None) -> Path:
        if not steps(self.checkpoints):
            raise MissingFile(
                f"RUN {self.path} has neither a trained model nor a checkpoint: {self.why_unsaved}",
                field="RUN", value=str(self.path),
            )  # fmt: skip
        return Path(find_checkpoint(str(self.checkpoints), flag="--step", step=step))


def is_run(path: Path) -> bool:
    return (path / SETTINGS).is_file()


def no_run_or_model(path: Path, name: str = "RUN|MODEL") -> MissingFile:
    """Makes the error for a path that is neither a run nor a model. name: the argument that the error names."""
    found = (
        f"neither the output directory of a run, with {SETTINGS}, nor a model directory, with config.json"
        if path.exists()
        else "no such directory"
    )
    return MissingFile(f"{name} {path}: {found}", field=name, value=str(path), expected="a run or a model")


def read_run(path: Path) -> RecordedRun:
    """Reads the record of a run. Raises MissingFile if there is no run, InvalidFile for unreadable settings."""
    if not path.is_dir():
        raise MissingFile(
            f"RUN {path}: no such directory; `slime runs DIR` lists the runs below DIR", field="RUN", value=str(path)
        )
    if not is_run(path):
        raise MissingFile(
            f"RUN {path}: expected the output directory of a run, with {SETTINGS}", field="RUN", value=str(path)
        )
    path = path.absolute()
    # Read first, since it refuses a file that is not text.
    settings = read_config(str(path / SETTINGS), "RUN")
    return RecordedRun(path, settings, _started_in(path), _run_name(path / SETTINGS))


def _run_name(path: Path) -> str | None:
    """Returns the name of the run. The record has it as a comment, since a repetition needs a name of its own."""
    text = path.read_text(encoding="utf-8")
    comments = text.partition("# Its own directory and name:\n")[2].partition("\n# Everything else")[0]
    try:
        identity = load("\n".join(line.removeprefix("# ") for line in comments.splitlines())) or {}
    except (yaml.YAMLError, RecursionError):
        identity = None
    if not isinstance(identity, dict):
        expected = "the directory and name of the run as YAML, each line behind `# `"
        raise InvalidFile(
            f"RUN {path}: cannot read the comments below `Its own directory and name`; expected {expected}",
            field="RUN", value=str(path), expected=expected,
        )  # fmt: skip
    return identity.get("run_name")


def _started_in(path: Path) -> Path:
    """Returns the directory in which the run was last started; the current one if that is unknown or gone."""
    try:
        found = _STARTED_IN.findall(read_regular(path / COMMAND).decode("utf-8", "replace"))
    except OSError:
        found = []
    return Path(found[-1]) if found and Path(found[-1]).is_dir() else Path.cwd()
