"""Checks that data sets are readable and have the columns that the flags name."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from slime.buffer.settings import BufferSettings
from slime.buffer.sources.base import Columns, prompt_of_row
from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.hub.names import dataset_name
from slime.rollout.generate.supervised import FUNCTION as SUPERVISED
from slime.rollout.prompts.tokenizer import (
    TOKENIZER_FILES,
    chat_template_fault,
    has_chat_template,
    no_tokens,
    unknown_characters,
)
from slime.rollout.rewards.registry import check_name, needs_label
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE, DEFAULT_ROLLOUT_FUNCTION
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, SlimeError, counted
from slime.types.files import check_readable
from slime.types.models.vision import IMAGE
from slime.types.prompt_files.readers import ENDINGS, reader_of
from slime.types.prompt_files.slices import split_slice

# The doctor reads the first ROWS rows of a file, and more of them until SECONDS have passed. A run reads all rows, and
# reports its progress every SECONDS.
ROWS = 2000
SECONDS = 5.0
# The texts of this many rows, and this many characters of each, are looked for in the tokenizer.
TOKENIZED_ROWS, TOKENIZED = 100, 10_000
# Plug-ins of the user that may score samples, or label them.
OWN_SCORERS = (
    "custom_rm_path", "custom_generate_function_path", "custom_agent_path", "rollout_sample_hook_path",
)  # fmt: skip
NO_LABEL = "label of a row"


def check_data(subject: Subject, *, all_rows: bool = False) -> Iterator[Finding]:
    """Checks each data set. all_rows: reads each file to its end, however long that takes."""
    args = subject.args
    if args.get("prompt_data") and args.get("rollout_global_dataset", True):
        columns, scorer = columns_of(args), scorer_of(args)
        yield from _file("--prompt-data", str(args["prompt_data"]), columns, args, scorer, all_rows)
    for name, path in _evaluation_sets(subject):
        columns, scorer = columns_of(args, name), scorer_of(args, name)
        yield from _file(f"--eval-prompt-data {name}", path, columns, args, scorer, all_rows)


def columns_of(args: Mapping[str, Any], evaluation_set: str | None = None) -> Columns:
    """Returns the columns of --prompt-data, or of an evaluation set, which may have columns of its own."""
    columns_of_set = {} if evaluation_set is None else (args.get("eval_columns") or {}).get(evaluation_set, {})

    def name(key: str, default: Any) -> Any:
        of_sets = args.get(f"eval_{key}") if evaluation_set is not None else None
        return columns_of_set.get(key) or of_sets or args.get(key) or default

    return Columns(
        input=name("input_key", "input"),
        label=name("label_key", None),
        metadata=name("metadata_key", "metadata"),
        tools=name("tool_key", "tools"),
        images=name("multimodal_keys", {}).get(IMAGE),
    )


def _evaluation_sets(subject: Subject) -> list[tuple[str, str]]:
    if subject.config is not None:
        return list(subject.config.buffer.evaluation_sets().items())
    return list(BufferSettings(eval_prompt_data=subject.flag("eval_prompt_data")).evaluation_sets().items())


def scorer_of(args: Mapping[str, Any], evaluation_set: str | None = None) -> str | None:
    """Returns the built-in reward of rows that name none; None if a plug-in of the user may score them."""
    of_set = (args.get("eval_overrides") or {}).get(evaluation_set) or {}
    if args.get("use_opd"):
        return None  # the teacher may be the only signal
    if evaluation_set is not None and args.get("eval_function_path"):
        return None
    own_source = args.get("data_source_path") not in (None, DEFAULT_DATA_SOURCE)
    if own_source or any(of_set.get(name) or args.get(name) for name in OWN_SCORERS):
        return None
    if args.get("rollout_function_path") not in (None, DEFAULT_ROLLOUT_FUNCTION):
        return None
    return of_set.get("rm_type") or args.get("rm_type") or ""


def _file(
    flag: str, source: str, columns: Columns, args: Mapping[str, Any], scorer: str | None, all_rows: bool
) -> Iterator[Finding]:
    try:
        path, rows = split_slice(source, flag)
    except SlimeError as error:
        yield fail(str(error), "FILE@[a:b] takes rows a to b")
        return
    if dataset_name(path):
        yield ok(f"{flag} {path}: a name on the Hub, which the run downloads")
        return
    file = Path(path)
    try:
        check_readable(file, flag)
    except ConfigError as error:
        yield fail(str(error), "correct the path, or put the data there")
        return
    try:
        read = reader_of(file, flag)
    except ConfigError:
        yield fail(f"{flag} {path}: unknown ending {file.suffix!r}", f"convert it to {ENDINGS}")
        return
    first = rows.start if rows.start is not None and rows.start >= 0 else 0
    last = rows.stop if rows.stop is not None and rows.stop >= 0 else None
    count = unlabelled = 0
    first_rendered, rewards, first_texts = "", list[Any](), list[str]()
    empty = 0
    whole, deadline = True, time.monotonic() + SECONDS
    try:
        for where, row in islice(read(path), first, last):
            if count >= ROWS and time.monotonic() > deadline:
                if not all_rows:
                    whole = False
                    break
                print(f"{flag} {path}: {count:,} rows checked so far", file=sys.stderr, flush=True)
                deadline = time.monotonic() + SECONDS
            prompt = prompt_of_row(row, columns, path=path, where=where)
            count += 1
            if count <= TOKENIZED_ROWS:
                first_texts += _texts(prompt.prompt)
            if scorer is not None and (reward := prompt.metadata.get("rm_type")) and reward not in rewards:
                _check_reward(str(reward), args, f"{path}, {where}: {columns.metadata}.rm_type")
                rewards.append(reward)
            first_rendered = first_rendered or (where if _is_rendered(prompt.prompt, args) else "")
            # With a template around it, an empty text has tokens.
            empty += not prompt.prompt and not _is_rendered(prompt.prompt, args)
            unlabelled += columns.label is not None and prompt.label is None
            reward = str(prompt.metadata.get("rm_type") or scorer)
            if prompt.label is None and scorer is not None and needs_label(reward):
                raise InvalidFile(
                    f"{path}, {where}: no label, and the reward {reward} compares with it", field=NO_LABEL
                )
    except ConfigError as error:
        yield fail(f"{flag}: {error}", _todo(error, columns))
        return
    if not count:
        yield fail(f"{flag} {source}: no rows", "name a file, or a slice of one, that has some")
        return
    if first_rendered and columns.images is None and not _has_template(args):
        wants = "--apply-chat-template is given" if args.get("apply_chat_template") else "the prompt is chat messages"
        yield fail(
            f"{flag} {path}, {first_rendered}: {wants}, but the tokenizer of --hf-checkpoint {args['hf_checkpoint']} "
            "has no chat template",
            "take a model that is tuned for chats, add its chat_template.jinja, or give prompts as text",
        )
        return
    if first_rendered and (fault := _template_fault(args)):
        yield fail(
            f"{flag} {path}, {first_rendered}: the chat template of --hf-checkpoint {args['hf_checkpoint']} cannot be "
            f"read: {fault}",
            "correct it, or copy the model's own file again",
        )
        return
    if unknown := _unknown_characters(first_texts, args):
        yield warn(
            f"{flag} {path}: the tokenizer of --hf-checkpoint {args['hf_checkpoint']} {no_tokens(unknown)}",
            "take a model that knows them, or other prompts",
        )
    if empty:
        yield warn(
            f"{flag} {path}: {empty} of {counted(count, 'prompt is', 'prompts are')} empty",
            "a run leaves out prompts without tokens: remove those rows, or fill them",
        )
    if unlabelled:
        yield warn(
            f"{flag} {path}: {unlabelled} of {counted(count, 'label is', 'labels are')} null",
            "rewards that compare with labels will fail",
        )
    label = "" if columns.label is None else f" and {columns.label!r}"
    if whole:
        yield ok(f"{flag} {path}: {counted(count, 'row')} read, each with {columns.input!r}{label}")
    else:
        yield ok(
            f"{flag} {path}: only the first {counted(count, 'row')} read, each with {columns.input!r}{label}; a run "
            "checks all when it starts"
        )


def _check_reward(name: str, args: Mapping[str, Any], where: str) -> None:
    """Raises InvalidSetting if a row names an unusable reward, since its group would be rejected."""
    try:
        known = check_name(name.strip())
    except ConfigError as error:
        raise InvalidSetting(f"{where}: {error}", field="rm_type", value=name) from None
    if known == "remote_rm" and not args.get("rm_url"):
        raise InvalidSetting.requires(f"{where} {name}", "--rm-url URL")


def _is_rendered(prompt: str | list[dict[str, Any]], args: Mapping[str, Any]) -> bool:
    """Returns whether the chat template renders the prompt; a rollout function of the user may not need it."""
    own_rollout = args.get("rollout_function_path") not in (None, DEFAULT_ROLLOUT_FUNCTION, SUPERVISED)
    return bool(args.get("apply_chat_template")) or (isinstance(prompt, list) and not own_rollout)


def _has_template(args: Mapping[str, Any]) -> bool:
    """Returns whether there is a chat template; also true without a tokenizer, which other checks report."""
    directory = args.get("hf_checkpoint")
    if "chat_template" in (args.get("apply_chat_template_kwargs") or {}) or not isinstance(directory, str):
        return True
    has_tokenizer = any((Path(directory) / name).is_file() for name in TOKENIZER_FILES)
    return not has_tokenizer or has_chat_template(directory)


def _template_fault(args: Mapping[str, Any]) -> str | None:
    directory = args.get("hf_checkpoint")
    if "chat_template" in (args.get("apply_chat_template_kwargs") or {}) or not isinstance(directory, str):
        return None
    return chat_template_fault(directory)


def _texts(prompt: str | list[dict[str, Any]]) -> list[str]:
    if isinstance(prompt, str):
        return [prompt]
    return [message["content"] for message in prompt if isinstance(message.get("content"), str)]


def _unknown_characters(texts: Sequence[str], args: Mapping[str, Any]) -> str:
    directory = args.get("hf_checkpoint")
    return unknown_characters(directory, *(t[:TOKENIZED] for t in texts)) if isinstance(directory, str) else ""


def _todo(error: ConfigError, columns: Columns) -> str:
    """Returns what to do about an error in the data of a run."""
    field = error.field
    if field == NO_LABEL and columns.label is None:
        return "--label-key names the column of the label"
    if field == columns.input:
        return "--input-key names the column of the prompt"
    if field == columns.label:
        return "--label-key names the column of the label; leave it out where there is none"
    if field == columns.metadata:
        return "--metadata-key names a column of objects"
    # An error without a field is of the whole file.
    return "fix or remove that row" if field else "repair the file, or write it again"
