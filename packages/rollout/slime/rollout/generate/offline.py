"""Answers and scores the prompts of a jsonl file, without a buffer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.calls.outputs import flatten
from slime.rollout.generate.default import run_iteration
from slime.rollout.launch import close_state, open_state
from slime.rollout.metrics import rollout_metrics, time_metrics
from slime.rollout.prompts.tokenizer import has_chat_template
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sources import MemorySource
from slime.types import Sample
from slime.types.directories import path_errors
from slime.types.errors import InvalidFile, InvalidSetting
from slime.types.files import check_readable, json_reason, whole_file


def generate_file(
    settings: RolloutSettings,
    prompts: Path,
    output: Path,
    *,
    input_key: str = "input",
    label_key: str = "label",
    metadata_key: str = "metadata",
    overwrite: bool = False,
) -> dict[str, float]:
    """Writes one JSON object per sample, in the order of the prompts; returns the metrics.

    Prompts longer than `--rollout-max-prompt-len` are left out and counted. No sample is dropped by a filter.
    Raises InvalidFile naming the line of a broken prompt; InvalidSetting for an `output` that cannot be a file
    or, without `overwrite`, is a file that is not empty.
    """
    check_output(output, overwrite)
    rows = read_prompts(prompts, input_key, label_key, metadata_key)
    if settings.apply_chat_template or any(isinstance(row["prompt"], list) for row in rows):
        _check_template(settings, prompts)
    state = open_state(settings)
    before = CALL.set(None)
    try:
        source = MemorySource(rows, settings.n_samples_per_prompt)
        fitting = [group for group in source.get_samples(len(rows)) if _fits(state, group[0])]
        source.add_samples(fitting)
        call = RolloutCall(0, len(fitting))
        CALL.set(call)
        started = time.monotonic()
        state.args.rollout_batch_size = state.args.over_sampling_batch_size = len(fitting)
        state.plugins.dynamic_filter = None
        state.loop.run(run_iteration(state, state.args, 0, source))
        seconds = time.monotonic() - started
        groups = sorted(source.completed, key=lambda group: group[0].index or 0)
        write_samples(output, flatten(groups))
        metrics = rollout_metrics(groups, state.args) | time_metrics(flatten(groups), seconds, call.reward_seconds)
        return metrics | {"rollout/prompt_too_long": float(len(rows) - len(fitting))}
    finally:
        CALL.reset(before)
        close_state(state)


def _check_template(settings: RolloutSettings, prompts: Path) -> None:
    if "chat_template" not in settings.apply_chat_template_kwargs and not has_chat_template(settings.hf_checkpoint):
        needed = (
            "--apply-chat-template" if settings.apply_chat_template else f"--prompts {prompts}, with chat messages,"
        )
        raise InvalidSetting.requires(
            needed, "a tokenizer with a chat template", f"--hf-checkpoint {settings.hf_checkpoint} has none"
        )


def _fits(state: Any, sample: Sample) -> bool:
    limit = state.args.rollout_max_prompt_len
    return limit is None or len(state.prompts.encode(sample)) <= limit


def read_prompts(path: Path, input_key: str, label_key: str, metadata_key: str) -> list[dict[str, Any]]:
    """Reads fields of Sample, one dict per line; skips empty lines. Raises InvalidFile naming a broken line."""
    check_readable(path, "--prompts")
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits, and deep lists
            raise InvalidFile(
                f"--prompts {path}, line {number}: not JSON: {json_reason(error)}",
                field="--prompts",
                value=line,
                expected="a JSON object",
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get(input_key), (str, list)):
            raise InvalidFile.must_be(
                f"--prompts {path}, line {number}",
                f"an object with text or a list of chat messages at the key {input_key!r} (--input-key)",
                got=row,
            )
        rows.append({"prompt": row[input_key], "label": row.get(label_key), "metadata": row.get(metadata_key) or {}})
    if not rows:
        raise InvalidFile(
            f"--prompts {path} is empty", field="--prompts", value=str(path), expected="at least one line"
        )
    return rows


def check_output(path: Path, overwrite: bool) -> None:
    """Raises InvalidSetting for a path that cannot be written, or not without `overwrite`; pipes are accepted."""
    if path.is_dir() or not path.parent.is_dir():
        raise InvalidSetting.must_be("--output", "a file in a directory that exists", got=str(path))
    if path.is_file() and path.stat().st_size and not overwrite:
        raise InvalidSetting.requires(f"--output {path}", "--overwrite", "the file exists and is not empty")


def write_samples(path: Path, samples: list[Sample]) -> None:
    whole = path.is_file() or not path.exists()
    # A device or a pipe is written as it is, and closed within `path_errors`, since closing writes the rest.
    with path_errors(path, "--output"), whole_file(path, field="--output") if whole else path.open("w") as file:
        for sample in samples:
            file.write(json.dumps(sample.to_dict(), default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} in a sample cannot be written as JSON")
