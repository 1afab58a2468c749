"""Checks data, rewards and model before Ray starts, to find in seconds what would stop a run minutes later.

These are checks of the doctor; here the first failure ends the run. They load no weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from slime.launcher.config.catalogue import declared
from slime.launcher.config.checks.run import check_model
from slime.launcher.config.run_config import RunConfig
from slime.launcher.doctor.data import ROWS, check_data, columns_of, scorer_of
from slime.launcher.doctor.finding import FAIL, WARN, Finding, Subject
from slime.launcher.doctor.model import check_weights
from slime.rollout.prompts.tokenizer import load_tokenizer
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE
from slime.rollout.settings.served_models import trained_server_args
from slime.types.errors import InvalidFile, InvalidSetting
from slime.types.prompt_files.readers import reader_of
from slime.types.prompt_files.slices import split_slice

# Files beside tokenizer.json that transformers reads, each where it exists.
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json")
# A run with one of these plug-ins may score samples itself and needs no reward function.
OWN_WAYS = ("rollout_function_path", "custom_generate_function_path", "custom_agent_path")


def check_start(config: RunConfig) -> list[str]:
    """Checks data, rewards and model of a run. Raises InvalidFile or InvalidSetting naming the flag.

    A dry run reads only the first rows of large files, and accepts a model without weights, since a plan does not need
    them. Returns a sentence for each warning, and for each check that was left out.
    """
    subject = Subject(config.flat, frozenset(config.explicit), config)
    dry = config.launcher.dry_run
    notes = []
    if config.generates:
        found = _all_good(check_data(subject, all_rows=not dry))
        notes += [f.what for f in found if f.status == WARN or " only the first " in f.what]
        check_rewards(config)
    directory = Path(config.trainer.hf_checkpoint)
    if config.generates:
        check_tokenizer(directory)
    # The weights may come from --load instead, but files that exist have to be complete.
    if any(directory.glob("*.safetensors*")):
        _all_good(check_weights("--hf-checkpoint", directory))
    elif _reads_weights(config):
        if not dry:
            check_model("--hf-checkpoint", directory, tokenizer=False, weights=True)
        notes.append(f"--hf-checkpoint {directory}: no .safetensors files yet; a run is refused without them")
    return notes


def _reads_weights(config: RunConfig) -> bool:
    """Returns whether the trainer, or an engine that the run starts, loads weights from --hf-checkpoint."""
    rollout = config.rollout
    starts_engines = config.has_engines and not rollout.rollout_external_engine_addrs
    loads = starts_engines and "auto" in [each.get("load_format", "auto") for each in trained_server_args(rollout)]
    return loads or (config.trainer.load is None and not config.launcher.debug_rollout_only)


def check_tokenizer(directory: Path) -> None:
    """Raises InvalidFile for a tokenizer that does not load, and NotAvailable if a package that reads it is missing.

    Reads a tokenizer.json without transformers, whose import takes seconds; other kinds of tokenizers need it.
    """
    for name in TOKENIZER_SETTINGS:
        path = directory / name
        if path.is_file() and not _is_object(path):
            raise _no_tokenizer(directory, f"{name} is not a JSON object")
    path = directory / "tokenizer.json"
    if not path.is_file():
        load_tokenizer(str(directory))
        return
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain exceptions
        raise _no_tokenizer(directory, f"{path.name}: {error}") from error


def _is_object(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _no_tokenizer(directory: Path, reason: str) -> InvalidFile:
    return InvalidFile(
        f"--hf-checkpoint {directory}: its tokenizer does not load: {reason}",
        field="--hf-checkpoint", value=str(directory), expected="a tokenizer",
    )  # fmt: skip


def check_rewards(config: RunConfig) -> None:
    """Raises InvalidSetting if neither a flag nor the rows of the data, or of evaluation sets, name a reward."""
    args, flags = config.flat, declared()
    for name, source in config.buffer.evaluation_sets().items():
        if scorer_of(args, name) == "":
            _check_rows_name_rewards(source, columns_of(args, name).metadata)
    if args["rm_type"] or args["custom_rm_path"] or args["num_rollout"] == 0:
        return
    if any(args[name] != flags[name].default for name in OWN_WAYS):
        return
    if args["data_source_path"] != DEFAULT_DATA_SOURCE or not args["rollout_global_dataset"]:
        return  # clients, or the user's data source, may name a reward in each sample
    _check_rows_name_rewards(str(args["prompt_data"]), args["metadata_key"])


def _check_rows_name_rewards(source: str, metadata_key: str) -> None:
    for where, row in _rows(source):
        metadata = row.get(metadata_key)
        if not isinstance(metadata, dict) or not metadata.get("rm_type"):
            raise InvalidSetting.required(
                "--rm-type or --custom-rm-path",
                f"nothing would score the samples ({source}, {where}, names no rm_type in its {metadata_key!r} either)",
            )


def _rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path, rows = split_slice(source)
    first = rows.start if rows.start is not None and rows.start >= 0 else 0
    yield from islice(reader_of(path, "--prompt-data")(path), first, first + ROWS)


def _all_good(findings: Iterator[Finding]) -> list[Finding]:
    """Returns the findings. Raises InvalidFile for the first that fails."""
    good = []
    for finding in findings:
        good.append(finding)
        if finding.status == FAIL:
            flag = finding.what.split(maxsplit=1)[0].rstrip(":")
            raise InvalidFile(f"{finding.what}; {finding.todo}", field=flag, expected=finding.todo)
    return good
