"""Checks the directories of models: config, tokenizer and complete weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.converters.families import find_family, read_config
from slime.converters.files.safetensors_dir import INDEX, TensorInfo, read_header
from slime.launcher.config.checks.run import TOKENIZER_FILES
from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.hub.names import model_name
from slime.launcher.plan.trainer_memory import GIB
from slime.launcher.run_directory.checkpoints import begins_with_reference, nothing_saved_yet
from slime.rollout.settings.model_file import FLAG, ConfiguredModel, read_models
from slime.types.errors import ConfigError, NotAvailable, counted
from slime.types.files import hub_hint
from slime.types.setting_values import flag_name

AGAIN = "copy or download it again"
SHOWN = 5


def check_model(subject: Subject) -> Iterator[Finding]:
    for name in ("hf_checkpoint", "ref_load", "load"):
        value = subject.flag(name)
        if not value:
            continue
        flag, directory = flag_name(name), Path(str(value))
        if name == "hf_checkpoint" and model_name(str(value)):
            yield ok(f"{flag} {value}: a name on the Hub, which the run downloads")
        elif name == "load" and (nothing_saved_yet(subject.args, directory) or begins_with_reference(subject.args)):
            continue
        elif not directory.is_dir():
            yield _none(flag, directory)
        elif name == "hf_checkpoint":
            yield from _directory(flag, directory, tokenizer=True)
        elif (directory / "config.json").is_file():
            yield from _directory(flag, directory, tokenizer=False)
    for model in _served(subject):
        place, directory = f"{FLAG} {subject.flag('sglang_config')}: model {model.name}", Path(model.path)
        if not model.trained:
            yield from _directory(place, directory, tokenizer=True) if directory.is_dir() else [_none(place, directory)]


def _served(subject: Subject) -> tuple[ConfiguredModel, ...]:
    """Returns the models of --sglang-config. Raises ConfigError for a file that cannot be read."""
    file, trained = subject.flag("sglang_config"), subject.flag("hf_checkpoint")
    if file is None:
        return ()
    try:
        return read_models(str(file), str(trained or ""), int(subject.flag("rollout_num_gpus_per_engine") or 1))
    except ConfigError:
        if trained is None:
            return ()  # which model is the trained one depends on --hf-checkpoint
        raise


def _none(place: str, directory: Path) -> Finding:
    hint = hub_hint(directory, place).removeprefix(": ") or "correct the path, or put the model there"
    return fail(f"{place} {directory}: no such directory", hint)


def _directory(flag: str, directory: Path, *, tokenizer: bool) -> Iterator[Finding]:
    try:
        config = read_config(directory)
    except ConfigError as error:
        yield fail(f"{flag}: {error}", "a Hugging Face directory has a config.json that is a JSON object")
        config = None
    if config is not None:
        yield from _family(flag, config)
    if tokenizer:
        yield from check_tokenizer(flag, directory)
    tensors: dict[str, TensorInfo] = {}
    problems = False
    for finding in check_weights(flag, directory, tensors):
        problems |= finding.status != "ok"
        yield finding
    if tensors and config is not None and not problems:
        yield from _complete(flag, config, tensors)


def _family(flag: str, config: dict[str, Any]) -> Iterator[Finding]:
    kind = config.get("model_type")
    try:
        family = find_family(config)
    except NotAvailable as error:
        yield warn(
            f"{flag}: model_type {kind!r} has no table of weights here",
            f"--train-backend fsdp may train it; megatron and conversion know {error.expected}",
        )
    else:
        yield ok(f"{flag}: a {family.name} ({kind})")


def check_tokenizer(flag: str, directory: Path) -> Iterator[Finding]:
    """Checks that the tokenizer exists and loads."""
    present = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not present:
        yield fail(
            f"{flag} {directory}: no tokenizer", f"copy the model's own files: one of {', '.join(TOKENIZER_FILES)}"
        )
        return
    from slime.rollout.prompts.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(str(directory))
    except Exception as error:  # tokenizers raises plain exceptions
        yield fail(f"{flag} {directory}: the tokenizer does not load: {_first_line(error)}", AGAIN)
        return
    yield ok(f"{flag}: tokenizer of {len(tokenizer):,} tokens")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def check_weights(flag: str, directory: Path, tensors: dict[str, TensorInfo] | None = None) -> Iterator[Finding]:
    """Checks that the files exist and are complete. Adds the tensors of their headers to `tensors`."""
    tensors = {} if tensors is None else tensors
    index = directory / INDEX
    weight_map: dict[str, str] = {}
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            yield fail(f"{flag}: {index.name} is not an index of shards: {_first_line(error)}", AGAIN)
            return
    files = sorted({directory / name for name in weight_map.values()} or directory.glob("*.safetensors"))
    if not files:
        yield fail(
            f"{flag} {directory}: no .safetensors files", "put the weights there; slime-convert makes them from others"
        )
        return
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        yield fail(f"{flag}: {len(missing)} of {counted(len(files), 'shard')} missing: {_some(missing)}", AGAIN)
    for file in files:
        if file.is_file():
            yield from _file(flag, file, tensors)
    lost = [f"{name} ({file})" for name, file in weight_map.items()
            if (directory / file).is_file() and (name not in tensors or tensors[name].file.name != file)]  # fmt: skip
    if lost:
        yield fail(f"{flag}: the index names tensors that its files do not hold: {_some(lost)}", AGAIN)
    elif not missing:
        size = sum(tensor.num_bytes for tensor in tensors.values())
        shards = counted(len(files), "safetensors file")
        yield ok(f"{flag}: {shards}, {counted(len(tensors), 'tensor')}, {size / GIB:.2f} GiB")


def _file(flag: str, file: Path, tensors: dict[str, TensorInfo]) -> Iterator[Finding]:
    try:
        header = read_header(file)
    except ConfigError as error:
        yield fail(f"{flag}: {error}", AGAIN)
        return
    tensors.update(header)
    end = max((tensor.offset + tensor.num_bytes for tensor in header.values()), default=0)
    size = file.stat().st_size
    if header and size > end:
        yield fail(f"{flag}: {file}: has {size} bytes, but its header describes {end}", AGAIN)


def _complete(flag: str, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> Iterator[Finding]:
    """Checks that the files hold the tensors that config.json describes, if its family is known."""
    try:
        parameters = list(find_family(config).parameters(config))
    except ConfigError:
        return
    shapes = {block.name: block.shape for parameter in parameters for block in parameter.blocks}
    missing = [name for name in shapes if name not in tensors]
    if missing:
        number = counted(len(missing), "tensor of the model is", "tensors of the model are")
        yield fail(f"{flag}: {number} missing: {_some(missing)}", AGAIN)
    wrong = [
        f"{name} is {list(tensors[name].shape)}, config.json says {list(shape)}"
        for name, shape in shapes.items() if name in tensors and tensors[name].shape != tuple(shape)
    ]  # fmt: skip
    if wrong:
        yield fail(f"{flag}: {_some(wrong, 2)}", "config.json and weights belong to two models: take both from one")


def _some(names: list[str], count: int = SHOWN) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
