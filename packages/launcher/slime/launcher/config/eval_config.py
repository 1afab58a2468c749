"""Reads `--eval-config FILE.yaml`: evaluation sets, each with its own settings.

    eval:
      defaults: {n_samples_per_eval_prompt: 8}
      datasets:
        - {name: sampled, path: held_out.jsonl, temperature: 1.0}
        - {name: greedy, path: held_out.jsonl, temperature: 0, n_samples_per_eval_prompt: 1}

`datasets` may also be a mapping by name: {sampled: {path: held_out.jsonl}, greedy: held_out.jsonl}. A set, and
`defaults`, take the keys of `slime.rollout.settings.eval_overrides`, and the columns of the file (input_key, label_key,
metadata_key, tool_key, multimodal_keys). Keys that neither has take the values of the flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.buffer.settings import COLUMNS
from slime.rollout.settings.eval_overrides import check_overrides
from slime.types.config_files import read_config
from slime.types.errors import InvalidFile, InvalidSetting, nearest

FLAG = "--eval-config"


def apply_eval_config(values: dict[str, Any]) -> None:
    """Puts the sets of the file `values["eval_config"]` into `eval_prompt_data`, `eval_overrides` and `eval_columns`.

    Raises MissingFile, InvalidFile, or InvalidSetting naming the set and the key.
    """
    path = values.get("eval_config")
    if path is None:
        return
    if values.get("eval_prompt_data"):
        raise InvalidSetting.conflict(FLAG, "--eval-prompt-data", "both name the evaluation sets")
    sets = _read(str(path))
    values["eval_prompt_data"] = [[name, data] for name, (data, _) in sets.items()]
    values["eval_columns"] = {name: _split(entry)[0] for name, (_, entry) in sets.items()}
    values["eval_overrides"] = {name: _split(entry)[1] for name, (_, entry) in sets.items()}


def _read(path: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns (path of the prompts, settings) of each set by its name."""
    content = read_config(path, flag=FLAG)
    part = content.get("eval")
    if set(content) != {"eval"} or not isinstance(part, Mapping):
        raise _invalid(path, f"keys {', '.join(content) or 'none'}", "one mapping: eval")
    for key in part:
        if key not in ("defaults", "datasets"):
            near = nearest(str(key), ("defaults", "datasets"))
            raise _invalid(path, f"eval.{key}", near or "defaults and datasets")
    defaults, datasets = part.get("defaults") or {}, part.get("datasets")
    if not isinstance(defaults, Mapping):
        raise _invalid(path, f"eval.defaults: {defaults!r}", "a mapping")
    _check("defaults", dict(defaults), path)
    if isinstance(datasets, Mapping):
        datasets = [_named(str(name), entry) for name, entry in datasets.items()]
    if not isinstance(datasets, list) or not datasets:
        raise _invalid(path, f"eval.datasets: {datasets!r}", "a list of {name, path, ...}, or a mapping by name")
    sets: dict[str, tuple[str, dict[str, Any]]] = {}
    for entry in datasets:
        needed = [entry.get(key) for key in ("name", "path")] if isinstance(entry, Mapping) else [None]
        if not all(isinstance(text, str) and text.strip() for text in needed):
            raise _invalid(path, f"eval.datasets: {entry!r}", "a mapping with the texts name and path")
        name = entry["name"]
        if name in sets:
            raise _invalid(path, f"eval.datasets: {name!r} twice", "a name of its own for each set")
        overrides = {key: value for key, value in entry.items() if key not in ("name", "path")}
        sets[name] = entry["path"], _check(name, {**defaults, **overrides}, path)
    return sets


def _named(name: str, entry: Any) -> Any:
    """Returns an entry of a mapping by name: settings with a path, or a path alone."""
    if isinstance(entry, str):
        return {"name": name, "path": entry}
    return {"name": name, **entry} if isinstance(entry, Mapping) else entry


def _split(entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (columns of the set's file, other settings)."""
    columns = {key: value for key, value in entry.items() if key in COLUMNS}
    return columns, {key: value for key, value in entry.items() if key not in COLUMNS}


def _check(name: str, entry: dict[str, Any], path: str) -> dict[str, Any]:
    columns, overrides = _split(entry)
    for key, value in columns.items():
        is_mapping = isinstance(value, Mapping)
        texts = list(value.values()) if is_mapping else [value]
        if is_mapping != (key == "multimodal_keys") or not all(isinstance(text, str) for text in texts):
            expected = "a mapping {image: COLUMN}" if key == "multimodal_keys" else "the name of a column"
            raise _invalid(path, f"{name}.{key}: {value!r}", expected)
    return columns | check_overrides({name: overrides}, f"{FLAG} {path}: ")[name]


def _invalid(path: str, got: str, expected: str) -> InvalidFile:
    return InvalidFile(f"{FLAG} {path}: got {got}, expected {expected}", field=FLAG, value=got, expected=expected)
