"""Data sets of reasoning-gym as prompt files: `reasoning_gym:NAME?size=200&seed=1&...`.

The file is generated once for each name, set of options and version of the package, and kept in the user's cache. The
metadata of a row names the reward function and holds the entry that it scores with, so no further flag is needed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from slime.types.directories import path_errors
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.files import whole_file
from slime.types.prompt_files.readers import BUFFER

PREFIX = "reasoning_gym:"
# With the package's own default, a seed of None, each restart would generate other prompts.
DEFAULTS: dict[str, Any] = {"size": 1000, "seed": 42}


def local_file(source: str, flag: str = "--prompt-data", package: str = BUFFER) -> str:
    """Returns the path of the generated file; any other source is returned as it is.

    Raises InvalidSetting for an unknown name or a wrong option, NotAvailable without reasoning-gym, which an
    extra of `package` installs.
    """
    if not source.startswith(PREFIX):
        return source
    name, _, query = source.removeprefix(PREFIX).partition("?")
    options = DEFAULTS | {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
    if not re.fullmatch(r"\w+", name):
        raise InvalidSetting.must_be(flag, f"{PREFIX}NAME?option=value&...", got=source)
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError as error:
        raise NotAvailable.not_installed(f"{flag} {source}", "reasoning-gym", f"{package}[reasoning-gym]") from error
    state = json.dumps([name, options, version], sort_keys=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "slime", "datasets")
    path = cache / f"reasoning_gym-{name}-{hashlib.sha256(state.encode()).hexdigest()[:12]}.jsonl"
    if not path.is_file():
        # Importing the package takes seconds.
        dataset = _create(name, options, source, flag)
        with path_errors(cache, flag):
            cache.mkdir(parents=True, exist_ok=True)
        with whole_file(path, "w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in _rows(name, dataset, source, flag))
    return str(path)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _create(name: str, options: dict[str, Any], source: str, flag: str) -> Any:
    # A dependency of the package has code with invalid escapes, which Python warns of.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise InvalidSetting.unknown("reasoning-gym data set", name, sorted(DATASETS), field=flag)
    try:
        return reasoning_gym.create_dataset(name, **options)
    except Exception as error:  # each data set raises exceptions of its own
        raise _refused("refuses these options", name, source, flag, error) from error


def _refused(problem: str, name: str, source: str, flag: str, error: Exception) -> InvalidSetting:
    return InvalidSetting(
        f"{flag} {source}: reasoning-gym {problem}: {type(error).__name__}: {error}",
        field=flag, value=source, expected=f"options of the data set {name}",
    )  # fmt: skip


def _rows(name: str, dataset: Any, source: str, flag: str) -> Iterator[dict[str, Any]]:
    items = iter(dataset)
    for number in range(len(dataset)):
        try:
            item = next(items)
        except Exception as error:  # options that no problem can meet, or files that the package lacks
            raise _refused(f"fails at problem {number}", name, source, flag, error) from error
        entry = {"question": item["question"], "answer": item["answer"], "metadata": item["metadata"]}
        kept = json.loads(json.dumps(entry, default=str))
        # Some scorers need values that JSON does not preserve, such as tuples.
        if number == 0 and dataset.score_answer(item["answer"], entry=item) != dataset.score_answer(
            item["answer"], entry=kept
        ):
            raise NotAvailable.unavailable(f"{flag} {source}", "its scorer needs more than JSON can hold")
        yield {
            "input": item["question"],
            "label": kept["answer"],
            "metadata": {"rm_type": "reasoning_gym", "source_dataset": name, "entry": kept},
        }
