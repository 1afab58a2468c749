"""Models that the engines of a run serve, read from `--sglang-config FILE.yaml`.

    sglang:
      - name: policy
        server_groups:
          - {num_gpus: 4, num_gpus_per_engine: 2}
      - name: judge
        model_path: /models/judge
        server_groups:
          - {num_gpus: 1, overrides: {mem_fraction_static: 0.8}}

One model is the trainer's, and receives its weights; the others keep theirs. Each has its own engines, in one or more
groups. `num_gpus` is that of a whole group; embedded engines are counted by `num_engines` in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.rollout.engines.kind import DECODE, PREFILL, REGULAR
from slime.types.config_files import read_config
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, NotAvailable

FLAG = "--sglang-config"
MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups")
GROUP_KEYS = ("worker_type", "num_gpus", "num_engines", "num_gpus_per_engine", "overrides")
# The older name of server_groups.
GROUPS_ALIAS = "engine_groups"
# The name by which plug-ins find the engines of the trained model, whatever its name in the file.
DEFAULT_MODEL = "default"
TYPES = (REGULAR, PREFILL, DECODE)
# Names are parts of log lines, metrics and URLs.
MOST_NAME = 100
# Larger numbers are typing errors, and planning engine by engine would take forever.
MOST_ENGINES = 10_000
MOST_GPUS = 1_000_000
REFUSED_TYPES = {
    "encoder": "each engine encodes the images of its own requests",
    "placeholder": "the GPUs that a run does not use stay free without being named",
}


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one model that are alike.

    place: where the file has it, for errors. worker_type: the part of a request that they do, one of TYPES. num_gpus:
    GPUs of all its engines together; None for engines that are counted by num_engines. overrides: flags of SGLang's
    server by name, over those of the command line.
    """

    place: str
    worker_type: str
    num_gpus: int | None
    num_engines: int | None
    num_gpus_per_engine: int
    overrides: Mapping[str, Any]


@dataclass(frozen=True)
class ConfiguredModel:
    """A model with engines of its own. trained: whether they receive the trainer's weights."""

    name: str
    path: str
    trained: bool
    groups: tuple[EngineGroup, ...]


def read_models(path: str, hf_checkpoint: str, num_gpus_per_engine: int) -> tuple[ConfiguredModel, ...]:
    """Reads the models of a file.

    hf_checkpoint: the trained model. num_gpus_per_engine: GPUs of an engine for which the file names none. Raises
    MissingFile; InvalidFile, UnknownFlag or InvalidSetting naming the key and its place; NotAvailable for a worker type
    without an implementation.
    """
    reader = _Reader(path, hf_checkpoint, num_gpus_per_engine)
    if not path.strip():
        raise InvalidSetting.must_be(FLAG, "a file of models", got=path)
    content = read_config(path, flag=FLAG, expected="a mapping with the key sglang, a list of models")
    reader.refuse_unknown(content, ("sglang",), "")
    entries = reader.list_of(content.get("sglang"), "sglang", "models")
    models = tuple(reader.model(entry, f"sglang[{number}]") for number, entry in enumerate(entries))
    reader.check_whole(models)
    return models


def counts_engines(path: str) -> bool:
    """Returns whether a file counts its engines by num_engines, as embedded ones are; False for a file that has none or
    that `read_models` refuses."""
    try:
        content = read_config(path, flag=FLAG)
    except ConfigError:
        return False
    groups = [
        group
        for entry in _list(content.get("sglang"))
        if isinstance(entry, dict)
        for group in (*_list(entry.get("server_groups")), *_list(entry.get(GROUPS_ALIAS)))
    ]
    return any(isinstance(group, dict) and group.get("num_engines") is not None for group in groups)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class _Reader:
    """Reads one file. Every error names the file, and the place in it."""

    def __init__(self, path: str, hf_checkpoint: str, num_gpus_per_engine: int) -> None:
        self._path, self._hf_checkpoint, self._per_engine = path, hf_checkpoint, num_gpus_per_engine

    def _wrong(self, place: str, expected: str, got: object, reason: str = "") -> InvalidFile:
        return InvalidFile.must_be(f"{FLAG} {self._path}: {place}", expected, got=got, reason=reason)

    def refuse_unknown(self, entry: Mapping[str, Any], known: Iterable[str], place: str) -> None:
        for key in entry:
            if key not in known:
                where = f"{FLAG} {self._path}" + (f": {place}" if place else "")
                raise InvalidFile.unknown("key", key, known, field=where)

    def list_of(self, value: Any, place: str, what: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._wrong(place, f"a list of {what}", value)
        return value

    def _mapping(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(place, "a mapping", value)
        return {str(key): each for key, each in value.items()}

    def _number(self, value: Any, place: str) -> int:
        if type(value) is not int or value < 1:
            raise self._wrong(place, "a whole number of at least 1", value)
        most = MOST_ENGINES if place.endswith(".num_engines") else MOST_GPUS
        if value > most:
            raise self._wrong(place, f"at most {most}", value)
        return value

    def _name(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
            raise self._wrong(place, "a name of letters, digits, dots, dashes and underscores", value)
        if len(value) > MOST_NAME:
            raise self._wrong(place, f"a name of at most {MOST_NAME} characters", value, f"it has {len(value)}")
        return value

    def _worker_type(self, value: Any, place: str) -> str:
        if isinstance(value, str) and value in REFUSED_TYPES:
            raise NotAvailable.unavailable(
                f"{FLAG} {self._path}: {place} {value}", REFUSED_TYPES[value], f"worker_type: {REGULAR}"
            )
        if not isinstance(value, str) or value not in TYPES:
            raise self._wrong(place, f"one of {', '.join(TYPES)}", value)
        return value

    def _overrides(self, value: Any, place: str) -> dict[str, Any]:
        if value is None:
            return {}
        from slime.rollout.engines.sglang.flags import check

        overrides = self._mapping(value, place)
        return check(overrides, f"{FLAG} {self._path}: {place}") if overrides else {}

    def model(self, value: Any, place: str) -> ConfiguredModel:
        entry = self._mapping(value, place)
        if GROUPS_ALIAS in entry and "server_groups" in entry:
            raise InvalidFile.conflict(f"{FLAG} {self._path}: {place}.{GROUPS_ALIAS}", "server_groups", "they are one")
        groups_key = GROUPS_ALIAS if GROUPS_ALIAS in entry else "server_groups"
        self.refuse_unknown(entry, (*MODEL_KEYS, *((GROUPS_ALIAS,) if groups_key == GROUPS_ALIAS else ())), place)
        name = self._name(entry.get("name"), f"{place}.name")
        directory = entry.get("model_path")
        if directory is not None and (not isinstance(directory, str) or not directory.strip() or "\0" in directory):
            raise self._wrong(f"{place}.model_path", "the directory of a model", directory)
        same = directory is None or os.path.realpath(directory) == os.path.realpath(self._hf_checkpoint)
        trained = entry.get("update_weights")
        if trained is None:
            trained = same
        if not isinstance(trained, bool):
            raise self._wrong(f"{place}.update_weights", "true or false", trained)
        if trained and not same:
            raise self._wrong(
                f"{place}.model_path", f"--hf-checkpoint {self._hf_checkpoint}, or left out", directory,
                "with update_weights: true its engines receive that model's weights",
            )  # fmt: skip
        if name == DEFAULT_MODEL and not trained:
            raise self._wrong(f"{place}.name", "another name", name, "plug-ins find the trained model by this one")
        per_engine = entry.get("num_gpus_per_engine")
        per_engine = (
            self._per_engine if per_engine is None else self._number(per_engine, f"{place}.num_gpus_per_engine")
        )
        groups = self.list_of(entry.get(groups_key), f"{place}.{groups_key}", "groups of engines")
        return ConfiguredModel(
            name, directory or self._hf_checkpoint, trained,
            tuple(self._group(group, f"{place}.{groups_key}[{i}]", per_engine) for i, group in enumerate(groups)),
        )  # fmt: skip

    def _group(self, value: Any, place: str, per_engine: int) -> EngineGroup:
        entry = self._mapping(value, place)
        self.refuse_unknown(entry, GROUP_KEYS, place)
        worker = self._worker_type(entry.get("worker_type", REGULAR), f"{place}.worker_type")
        if (entry.get("num_gpus") is None) == (entry.get("num_engines") is None):
            raise self._wrong(place, "a group with num_gpus, or for embedded engines num_engines", dict(entry))
        numbers = {
            key: None if entry.get(key) is None else self._number(entry[key], f"{place}.{key}")
            for key in ("num_gpus", "num_engines", "num_gpus_per_engine")
        }
        per_engine = numbers["num_gpus_per_engine"] or per_engine
        if numbers["num_engines"] is not None:
            if numbers["num_gpus_per_engine"] is not None:
                raise self._wrong(
                    f"{place}.num_gpus_per_engine", "left out", per_engine, "num_engines counts embedded engines"
                )
            per_engine = 1
        elif (numbers["num_gpus"] or 0) % per_engine:
            raise self._wrong(f"{place}.num_gpus", f"a multiple of num_gpus_per_engine {per_engine}", entry["num_gpus"])
        overrides = self._overrides(entry.get("overrides"), f"{place}.overrides")
        return EngineGroup(place, worker, numbers["num_gpus"], numbers["num_engines"], per_engine, overrides)

    def check_whole(self, models: tuple[ConfiguredModel, ...]) -> None:
        seen: set[str] = set()
        for number, model in enumerate(models):
            if model.name in seen:
                raise self._wrong(f"sglang[{number}].name", "a name that no other model has", model.name)
            seen.add(model.name)
            types = {group.worker_type for group in model.groups}
            if types not in ({REGULAR}, {PREFILL, DECODE}):
                raise self._wrong(
                    f"sglang[{number}].server_groups", "regular ones, or prefill and decode ones", sorted(types),
                    "a request has one engine that does prefill and one that decodes, or one that does both",
                )  # fmt: skip
        trained = [model.name for model in models if model.trained]
        if len(trained) != 1:
            found = "no model" if not trained else "the models " + " and ".join(trained)
            raise InvalidFile(
                f"{FLAG} {self._path}: the weights of the trainer go to one model, and here to {found}; give that one "
                "no model_path, or --hf-checkpoint, and the others update_weights: false",
                field="update_weights", value=", ".join(trained), expected="one model with update_weights: true",
            )  # fmt: skip
        counts = {group.num_gpus is None for model in models for group in model.groups}
        if len(counts) > 1:
            raise InvalidFile(
                f"{FLAG} {self._path}: some groups have num_gpus and others num_engines, but the engines of a run are "
                "of one kind: SGLang's are counted by GPUs, embedded ones by engines",
                field="num_engines", expected="num_gpus in each group, or num_engines in each",
            )  # fmt: skip
        engines = sum(group.num_engines or 0 for model in models for group in model.groups)
        if engines > MOST_ENGINES:
            raise self._wrong("num_engines", f"at most {MOST_ENGINES} in all groups together", engines)
