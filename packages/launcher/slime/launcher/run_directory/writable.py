"""Checks that a run can write its directories, and that it would not replace files that slime did not write."""

from __future__ import annotations

import glob
import os
import re
import string
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.launcher.run_directory import checkpoints
from slime.rollout.recordings.paths import MAGIC, path_of
from slime.trainer.settings.debug import TRAIN_DATA_FORMAT
from slime.types.directories import check_replaceable, path_errors
from slime.types.errors import InvalidSetting
from slime.types.files import check_file_place, check_own_file
from slime.types.setting_values import flag_name

# Settings that name a directory to write into; only the last part of its path may have fields in braces.
DIRECTORIES = (
    "output_dir", "save", "save_hf", "buffer_dir", "update_weight_disk_dir", "dump_details", "memory_snapshot_dir",
    "profile_dir", "wandb_dir",
)  # fmt: skip
# Settings that name checkpoints and models that a run must not delete.
KEPT = ("load", "ref_load", "opd_teacher_load", "critic_load", "hf_checkpoint", "save")
# Settings that name a file for each iteration, or one for all -> (what is near the beginning of the file, its kind).
DUMPS = {
    "save_debug_rollout_data": (MAGIC, "recorded rollout"),
    "save_debug_train_data": (TRAIN_DATA_FORMAT.encode(), "file of training data"),
}


def check_places(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for a directory that is a file or lies below one, or that this run may not write to.

    args: every setting by name, with `checkpoint_dir`.
    """
    for name in DIRECTORIES:
        value = args.get(name)
        if value:
            before, braces, _ = str(value).partition("{")
            path = Path(before or ".")
            # An export is written beside the directory that it replaces.
            _check(flag_name(name), str(value), path.parent if name == "save_hf" and not braces else path)
    _check_recovery(args)
    for flag, path in _replaced(args):
        check_replaceable(path, field=flag)
    for name, (sign, kind) in DUMPS.items():
        for path in dumps(args, name):
            check_file_place(path, field=flag_name(name))
            if _is_one_file(args[name]):
                # A path that was typed whole may be that of another file.
                check_own_file(path, sign, kind, field=flag_name(name))


def _check_recovery(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for a directory among the restart points, which this run or the next one would delete."""
    recovery = Path(os.path.realpath(args["output_dir"])) / checkpoints.RECOVERY
    for name in KEPT:
        value = args.get(name)
        if value and Path(os.path.realpath(value)).is_relative_to(recovery):
            raise InvalidSetting(
                f"{flag_name(name)} {value}: {recovery} holds restart points, which are deleted when a run with this "
                "--output-dir starts; move it elsewhere first",
                field=flag_name(name), value=str(value), expected=f"a directory outside of {recovery}",
            )  # fmt: skip


def saved_below(args: Mapping[str, Any]) -> list[str]:
    """Returns the directories below which a run saves checkpoints and models. args: as in `check_places`."""
    directories = [str(args["output_dir"]), str(args["checkpoint_dir"])]
    if template := args["save_hf"]:
        before, braces, _ = str(template).partition("{")
        directories.append(os.path.dirname(before) if braces else before)
    return [os.path.abspath(directory) for directory in directories]


def matches(template: str | None) -> list[Path]:
    """Returns existing paths that match a template, whose fields stand for numbers, with or without `eval_` before."""
    if not template:
        return []
    parts = [(text, field is not None) for text, field, _, _ in string.Formatter().parse(template)]
    if not any(is_field for _, is_field in parts):
        return [Path(template)] if os.path.lexists(template) else []
    pattern = "".join(glob.escape(text) + "*" * is_field for text, is_field in parts)
    exact = re.compile("".join(re.escape(text) + r"(?:eval_)? *\d+" * is_field for text, is_field in parts))
    return [Path(path) for path in sorted(glob.glob(pattern, include_hidden=True)) if exact.fullmatch(path)]


def dumps(args: Mapping[str, Any], name: str) -> list[Path]:
    """Returns the existing files of a setting in DUMPS, those of evaluations among them."""
    template = args.get(name)
    if not template or not _is_one_file(template):
        return matches(template)
    paths = [Path(template)]
    if name == "save_debug_rollout_data":
        paths.append(path_of(template, 0, evaluation=True))
    return [each for each in paths if os.path.lexists(each)]


def _is_one_file(template: str) -> bool:
    return all(field is None for _, field, _, _ in string.Formatter().parse(template))


def exports(args: Mapping[str, Any]) -> list[Path]:
    """Returns the existing paths of --save-hf."""
    return matches(args["save_hf"])


def _replaced(args: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yields directories that the run would replace, each with the flag that names it."""
    if args["num_rollout"] == 0 or args["debug_rollout_only"]:
        return
    yield "--output-dir", Path(str(args["output_dir"])) / "model"
    for path in exports(args):
        yield "--save-hf", path
    if args["save_interval"] is not None:
        directory = Path(str(args["checkpoint_dir"]))
        first = checkpoints.step_after(directory, args["load"])
        for step, path in checkpoints.named(directory):
            if step >= first:
                yield "--save" if args["save"] else "--output-dir", path


def _check(flag: str, value: str, path: Path) -> None:
    with path_errors(path, flag):
        while not path.exists() and path != path.parent:
            # Path.exists is False for a dangling link, but mkdir fails on it.
            if path.is_symlink():
                break
            path = path.parent
    if not path.is_dir():
        kind = "a link that leads nowhere" if path.is_symlink() and not path.exists() else "a file"
        raise InvalidSetting(
            f"{flag} {value}: {path} is {kind}, not a directory", field=flag, value=value, expected="a directory"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise InvalidSetting(
            f"{flag} {value}: no permission to write in {path}",
            field=flag, value=value, expected="a directory that this user may write",
        )  # fmt: skip
    # Permission bits do not suffice, least of all for root: /proc and read-only mounts refuse writes, too.
    with path_errors(path, flag):
        os.rmdir(tempfile.mkdtemp(prefix=".slime-", dir=path))
