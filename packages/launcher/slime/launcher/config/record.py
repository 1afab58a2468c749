"""The record of a run: run.yaml, command.txt and versions.json in its output directory."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from slime.launcher.config.catalogue import FAMILIES, declared
from slime.launcher.config.run_config import RunConfig
from slime.types.directories import path_errors
from slime.types.files import check_file_place, write_whole

SETTINGS, COMMAND, VERSIONS = "run.yaml", "command.txt", "versions.json"
# These identify this run; a repetition needs other values.
OWN = ("output_dir", "run_name", "overwrite")
GIT_SECONDS = 5.0


@contextmanager
def earlier_record(directory: Path, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Puts the settings of the earlier start back if this one ends before it has begun: a resumed run that is refused
    is still the run that it was."""
    names = (SETTINGS, VERSIONS)
    before = {name: (directory / name).read_text("utf-8") for name in names if (directory / name).is_file()}
    try:
        yield
    except BaseException:
        if SETTINGS in before and not has_begun():
            for name, content in before.items():
                write_whole(directory / name, content)
        raise


def write_record(directory: Path, config: RunConfig, command: Sequence[str]) -> None:
    """Writes the record of this start of the run; keeps the commands of earlier starts. command: as it was typed."""
    write_whole(directory / SETTINGS, settings_text(config))
    write_whole(directory / VERSIONS, json.dumps(versions(), indent=2) + "\n")
    check_file_place(directory / COMMAND, field="--output-dir")
    with path_errors(directory / COMMAND, "--output-dir"), (directory / COMMAND).open("a", encoding="utf-8") as file:
        file.write(f"# {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}, in {Path.cwd()}\n{shlex.join(command)}\n")


def settings_text(config: RunConfig) -> str:
    """Returns the settings that flags, files and the environment set as YAML, and all others as comments."""
    explicit = _keys(config.explicit)
    identity = {name: explicit.pop(name) for name in OWN if name in explicit}
    implicit = {
        name: config.flat.get(name)
        for name in declared()
        if name not in config.explicit and name not in OWN and config.flat.get(name) is not None
    }
    return (
        "# Settings of this run. To repeat it: slime train --config run.yaml --output-dir ANOTHER\n"
        f"{_yaml(explicit)}\n# Its own directory and name:\n{_commented(identity)}\n# Everything else, as it was:\n"
        f"{_commented(implicit)}"
    )


def _keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as keys of a --config file, with one key for each flag of a family."""
    keys = {name: value for name, value in values.items() if value is not None}
    for family in FAMILIES:
        for name, value in (keys.pop(family.setting, None) or {}).items():
            keys[family.setting.removesuffix("args") + name] = value
    return keys


def _yaml(values: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(dict(values), default=str))
    return yaml.safe_dump(plain, sort_keys=True, allow_unicode=True, width=1000) if plain else ""


def _commented(values: Mapping[str, Any]) -> str:
    return "".join(f"# {line}\n" for line in _yaml(values).splitlines())


def versions() -> dict[str, Any]:
    """Returns versions of Python and installed packages, and git revisions of the source trees of the run."""
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}
    trees = {str(path): revision for path in (Path.cwd(), Path(__file__).parent) if (revision := _git(path))}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git": trees,
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _git(directory: Path) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True, text=True, timeout=GIT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
