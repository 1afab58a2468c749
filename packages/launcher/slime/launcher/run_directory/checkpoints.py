"""The checkpoints of a run: their paths, the newest one, and the deletion of old ones.

`DIR/step_000004` holds the policy after step 4. With the Megatron backend it is `DIR/iter_0000004`, and the file
`DIR/latest_checkpointed_iteration.txt` names the newest checkpoint, as in Megatron-LM.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from slime.converters.files.adapter import CONFIG_FILE as ADAPTER_CONFIG
from slime.converters.torch_dist.directory import iteration_directory
from slime.types.directories import remove_directory, try_lock
from slime.types.errors import Busy, ConfigError, InvalidSetting, MissingFile
from slime.types.files import open_regular

log = logging.getLogger(__name__)

PLACE_FILE = "data_place.jsonl"  # position in the prompt data, written by the buffer
STATE_FILE = "trainer.json"  # in every checkpoint of the trainer, which appears complete or not at all
RECOVERY = "recovery"  # directory of restart points below --output-dir, which is emptied at the start and end of a run
NAME = re.compile(r"(?:step|iter)_(\d+)")
TRACKER = "latest_checkpointed_iteration.txt"
# Attempts to open the newest checkpoint of a run that deletes old ones.
ATTEMPTS = 10
# Files of plain weights that training can start from: a Hugging Face model, a converted torch_dist one, a LoRA adapter.
MODEL_FILES = ("config.json", ".metadata", TRACKER, ADAPTER_CONFIG)


def checkpoint_path(directory: Path, step: int, backend: str) -> Path:
    """Returns the path of the checkpoint after `step`."""
    return directory / (f"iter_{step:07d}" if backend == "megatron" else f"step_{step:06d}")


def steps(directory: Path) -> dict[int, Path]:
    """Returns the complete checkpoints in a directory, by step in ascending order."""
    return dict(sorted((step, path) for step, path in named(directory) if (path / STATE_FILE).is_file()))


def named(directory: Path) -> Iterator[tuple[int, Path]]:
    """Yields (step, path) for every path with the name of a checkpoint, complete or not."""
    for path in directory.iterdir() if directory.is_dir() else ():
        if match := NAME.fullmatch(path.name):
            yield int(match[1]), path


def step_after(directory: Path, load: str | None) -> int:
    """Returns the first step of a run that loads `load` and saves to `directory`; 0 if `load` is not in it."""
    path = Path(os.path.realpath(load or ""))
    match = NAME.fullmatch(path.name)
    return int(match[1]) + 1 if load and match and path.parent == Path(os.path.realpath(directory)) else 0


def has_checkpoint(path: str) -> bool:
    """Returns whether `path` is a run's checkpoint, or a directory that holds one."""
    return (Path(path) / STATE_FILE).is_file() or bool(steps(Path(path)))


def nothing_saved_yet(values: Mapping[str, Any], load: Path) -> bool:
    """Returns whether --load is the directory that this run saves to and is still empty. values: settings by name."""
    output_dir = values.get("output_dir")
    save = values.get("save") or (Path(output_dir) / "checkpoints" if isinstance(output_dir, str) else None)
    if not isinstance(save, (str, Path)) or values.get("ckpt_step") is not None:
        return False
    return _is_empty(load) and os.path.realpath(save) == os.path.realpath(load)


def begins_with_reference(values: Mapping[str, Any]) -> bool:
    """Returns whether a run with Megatron begins with the weights of --ref-load: --load, missing or empty, is the place
    of checkpoints that are still to come. values: settings by name.

    A reference that is a run's checkpoint is not taken, because it would be continued.
    """
    load, reference = values.get("load"), values.get("ref_load")
    if not isinstance(load, str) or not isinstance(reference, str) or values.get("train_backend") != "megatron":
        return False
    return values.get("ckpt_step") is None and _is_empty(Path(load)) and not has_checkpoint(reference)


def loads_nothing(load_root: str | None, load: str | None) -> bool:
    """Returns whether --load (`load_root`) held no checkpoint, so that a run begins with `load` or --hf-checkpoint."""
    return load_root is not None and (load is None or not Path(load).is_relative_to(load_root))


def _is_empty(directory: Path) -> bool:
    if directory.is_file():
        return False
    return not directory.is_dir() or all(path.name.startswith(".") for path in directory.iterdir())


def find_checkpoint(path: str, *, flag: str = "--load", step: int | None = None) -> str:
    """Returns `path` if it is a checkpoint or a model, else the newest checkpoint in it, or the one of `step`.

    Raises MissingFile naming `flag`.
    """
    directory = Path(path)
    if step is not None:
        return _of_step(directory, flag, step)
    if (directory / STATE_FILE).is_file():
        return path
    found = steps(directory)
    if found:
        return str(found[max(found)])
    if any((directory / name).is_file() for name in MODEL_FILES):
        if (directory / TRACKER).is_file() and not (directory / "config.json").is_file():
            try:
                iteration_directory(directory)
            except ConfigError as error:
                raise error.at(flag) from None
        return path
    expected = f"{STATE_FILE} of a checkpoint, step_NNNNNN or iter_NNNNNNN of a run, or config.json of a model"
    message = f"{flag} {path} holds no checkpoint: expected {expected}"
    if flag == "--load" and _is_empty(directory):
        message += "; for a run that starts now and is continued later, give --save the same directory, or with"
        message += " --train-backend megatron the first weights as --ref-load"
    raise MissingFile(message, field=flag, value=path, expected=expected)


def continued_step(load: str | None, start_rollout_id: int | None) -> int | None:
    """Returns the step after which a run with the checkpoint `load` continues; None if it starts afresh.

    A run starts afresh from a model that is not a checkpoint of a run, and with a --start-rollout-id other than the
    next step.
    """
    state = Path(load or "") / STATE_FILE
    if load is None or not state.is_file():
        return None
    try:
        step = int(json.loads(state.read_text())["step"])
    except (ValueError, KeyError, TypeError):
        return None  # the trainer reports the fault
    return step if step >= 0 and start_rollout_id in (None, step + 1) else None


def _of_step(directory: Path, flag: str, step: int) -> str:
    names = [checkpoint_path(directory, step, backend) for backend in ("megatron", "fsdp")]
    existing = [path for path in names if (path / STATE_FILE).is_file() or (path / ".metadata").is_file()]
    if not existing:
        known = ", ".join(map(str, steps(directory))) or "none"
        raise MissingFile(
            f"{flag}: no checkpoint of step {step} in {directory}; steps there: {known}",
            field=flag,
            value=step,
            expected=known,
        )
    return str(existing[0])


def prune(directory: Path, *, keep: int | None, retain_interval: int | None, needed: str | None = None) -> list[Path]:
    """Deletes complete checkpoints except the last `keep` and every `retain_interval`-th; returns the deleted ones.

    Both None: keeps all. keep None: keeps the newest and those of the interval. needed: path of a checkpoint that is
    kept in any case. A checkpoint with files that slime did not write is kept, with a warning; one that another process
    reads (`held`) is kept for a later call.
    """
    if keep is None and retain_interval is None:
        return []
    found = steps(directory)
    old = list(found)[: -(keep or 1)]
    deleted = []
    in_use = None if needed is None else os.path.realpath(needed)
    for path in (found[step] for step in old if retain_interval is None or (step + 1) % retain_interval):
        if in_use is not None and os.path.realpath(path) == in_use:
            continue
        try:
            # Opened for writing, without which network file systems give no exclusive lock.
            with open(path / STATE_FILE, "r+b") as state:
                if try_lock(state.fileno()) is False:
                    _say_held(path)
                    continue
                remove_directory(path, field="--save-keep")
        except (InvalidSetting, OSError) as error:
            log.warning("not deleted: %s", error)
        else:
            deleted.append(path)
    return deleted


@functools.cache
def _say_held(path: Path) -> None:
    """Says it once; each further checkpoint would say it again."""
    log.warning("%s is kept as long as another process reads it", path)


@contextmanager
def held(choose: Callable[[], Path]) -> Iterator[Path]:
    """Yields the model or checkpoint that `choose` returns; until the end of the block, or of this process, `prune`
    keeps it.

    Chooses again if a run deletes the checkpoint just then; raises Busy if that goes on. On a file system without
    locks, has no effect.
    """
    for _ in range(ATTEMPTS):
        path = choose()
        with ExitStack() as opened:
            try:
                state = opened.enter_context(open_regular(path / STATE_FILE))
            except OSError:
                state = None  # a model that is not a checkpoint, or a checkpoint that is deleted just now
            if path.is_dir() if state is None else _lock_shared(state, path / STATE_FILE):
                yield path
                return
    raise Busy(
        f"{path}: the run deletes its checkpoints faster than they can be opened; use a larger --save-keep",
        field="--save-keep", value=str(path),
    )  # fmt: skip


def _lock_shared(state: BinaryIO, path: Path) -> bool:
    """Returns whether `state` is locked, or cannot be, and still lies at `path`."""
    try:
        fcntl.flock(state, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # the file system has no locks
    try:
        return os.path.samestat(path.stat(), os.fstat(state.fileno()))
    except FileNotFoundError:
        return False
