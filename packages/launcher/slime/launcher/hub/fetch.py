"""Downloads models and data sets from the Hub into the cache of the Hub's own libraries."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.hub.names import HubName, dataset_name, model_name
from slime.types.directories import path_errors
from slime.types.errors import MissingFile, NotAvailable
from slime.types.files import whole_file
from slime.types.prompt_files.slices import split_slice

# The files of a model that this project reads: no pickles, no code.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
OTHER_FILES = ("*/*", "consolidated*")
# Before this version, the library ran code that data sets contained.
SAFE_DATASETS = 3
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Fetched:
    """A model or a data set of the Hub.

    path: its path on this machine. pinned: the name with the commit that was fetched, which fetches the same again.
    """

    path: str
    pinned: str


def fetch(values: dict[str, Any]) -> dict[str, Any]:
    """Replaces names on the Hub in `values`, settings by name, by local paths. Returns these settings with the commits
    that were fetched.

    Raises MissingFile for a model or data set that is not in the cache and cannot be downloaded, and NotAvailable if
    the library that downloads it is not installed.
    """
    pinned: dict[str, Any] = {}
    for setting, flag, find in (
        ("hf_checkpoint", "--hf-checkpoint", _model),
        ("prompt_data", "--prompt-data", _dataset),
    ):
        text = values.get(setting)
        if isinstance(text, str):
            fetched = find(text, flag)
            values[setting] = fetched.path
            pinned |= {setting: fetched.pinned} if fetched.pinned != text else {}
    words = [w for item in values.get("eval_prompt_data") or () for w in ([item] if isinstance(item, str) else item)]
    if not all(isinstance(word, str) for word in words):
        return pinned  # an error where the sets are read
    if len(words) == 1 and (name := dataset_name(split_slice(words[0], "--eval-prompt-data")[0])):
        words.insert(0, name.last)
    sets = [
        (name, _dataset(path, f"--eval-prompt-data {name}")) for name, path in zip(*[iter(words)] * 2, strict=False)
    ]
    local = [[name, fetched.path] for name, fetched in sets]
    if local and local != values["eval_prompt_data"] and len(words) % 2 == 0:
        values["eval_prompt_data"] = local
        pinned["eval_prompt_data"] = [[name, fetched.pinned] for name, fetched in sets]
    return pinned


def local_model(text: str, flag: str) -> str:
    """Returns the directory of a model on the Hub, downloaded unless it is in the cache; returns paths unchanged."""
    return _model(text, flag).path


def _model(text: str, flag: str) -> Fetched:
    name = model_name(text)
    if name is None:
        return Fetched(text, text)
    hub = _library("huggingface_hub", f"{flag} {text}")
    try:
        directory = str(
            hub.snapshot_download(
                name.name, revision=name.revision, allow_patterns=MODEL_FILES, ignore_patterns=OTHER_FILES
            )
        )
    except Exception as error:  # the library also raises errors of its HTTP client
        raise _not_fetched(flag, text, name, error, "") from error
    return Fetched(directory, _pinned(text, name, directory))


def _dataset(text: str, flag: str) -> Fetched:
    """Fetches the file of a data set; keeps the slice `@[a:b]` of `text`."""
    path, _ = split_slice(text, flag)
    name = dataset_name(path)
    if name is None:
        return Fetched(text, text)
    setting = f"{flag} {text}"
    datasets = _library("datasets", setting)
    version = str(getattr(datasets, "__version__", "0"))
    if int(version.partition(".")[0]) < SAFE_DATASETS:
        raise NotAvailable.requires(
            setting,
            f"datasets {SAFE_DATASETS}.0 or later",
            f"{version} is installed, which may run code of a data set: pip install 'datasets>={SAFE_DATASETS}'",
        )
    try:
        dataset = datasets.load_dataset(name.name, name.config, split=name.split, revision=name.revision)
    except Exception as error:  # the library raises errors of many kinds
        raise _not_fetched(flag, text, name, error, "dataset") from error
    rows = text[len(path) :]
    # The library names the directory of its files after the commit.
    files = [file["filename"] for file in dataset.cache_files]
    pinned = _pinned(path, name, files[0] if files else "")
    return Fetched(str(_as_file(name, dataset)) + rows, pinned + rows)


def _pinned(text: str, name: HubName, cached: str) -> str:
    """Returns the name in `text` with the commit that the path in the cache contains, if any."""
    commit = next((part for part in Path(cached).parts if COMMIT.fullmatch(part)), None)
    return text if commit is None else f"{text.removesuffix(f'@{name.revision}')}@{commit}"


def _as_file(name: HubName, dataset: Any) -> Path:
    """Writes a data set as Parquet, once for each version: the library's files are named after their content."""
    # A data set that the library holds only in memory has no files.
    content = [file["filename"] for file in dataset.cache_files] or dataset._fingerprint
    state = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
    words = [*name.name.split("/"), *([name.config] if name.config else []), name.split, state]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "slime", "datasets")
    path = cache / ("--".join(words) + ".parquet")
    if not path.is_file():
        with path_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
        with whole_file(path, "wb") as file:
            dataset.to_parquet(file)
    return path


def _library(package: str, setting: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise NotAvailable.requires(setting, f"the package {package}", f"pip install {package}") from None


def _not_fetched(flag: str, text: str, name: HubName, error: Exception, kind: str) -> MissingFile:
    reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    options: Mapping[str, str] = {"--repo-type": kind, "--revision": name.revision or ""}
    words = "".join(f" {option} {value}" for option, value in options.items() if value)
    file = "/FILE" if kind else ""
    return MissingFile(
        f"{flag} {text} is neither a path here nor in the cache, and could not be downloaded from the Hub: {reason}. "
        f"For a private or gated one set HF_TOKEN; without a network, `hf download {name.name}{words} --local-dir "
        f"{name.last}` elsewhere, copy it, and give {flag.split()[0]} {name.last}{file}",
        field=flag, value=text, expected="a path, or a name on the Hub",
    )  # fmt: skip
