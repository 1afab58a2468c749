"""Protects the results of an earlier run, unless the new run resumes it or has --overwrite."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, Protocol

from slime.launcher.run_directory import checkpoints, writable
from slime.launcher.run_directory.kept_samples import DIRECTORY as SAMPLES
from slime.launcher.run_directory.kept_samples import kept_files, remove_kept
from slime.launcher.run_directory.state import FILE as STATE
from slime.types.directories import remove_directory
from slime.types.errors import InvalidSetting

# Files in --output-dir beside checkpoints, TensorBoard events and the trained model.
FILES = ("metrics.jsonl", "eval.json", "eval_samples.json", "reward.png")
MODEL = "model"
MAX_NAMES = 4


class Run(Protocol):
    """The parts of a RunConfig that decide where a run writes."""

    @property
    def launcher(self) -> Any: ...
    @property
    def trainer(self) -> Any: ...
    @property
    def flat(self) -> dict[str, Any]: ...
    @property
    def output_dir(self) -> Path: ...
    @property
    def checkpoint_dir(self) -> Path: ...
    @property
    def tensorboard_dir(self) -> Path | None: ...


def check_unused(config: Run) -> None:
    """Raises InvalidSetting if the run would write over the results of another."""
    if config.launcher.overwrite or resumes(config):
        return
    found = used(config)
    if found:
        directory = config.output_dir
        short = [path.relative_to(directory) if path.is_relative_to(directory) else path for path in found]
        names = ", ".join(map(str, short[:MAX_NAMES])) + (", ..." if len(found) > MAX_NAMES else "")
        resume = f"--load {shlex.quote(str(config.checkpoint_dir))}, to resume it; "
        expected = f"{resume if checkpoints.steps(config.checkpoint_dir) else ''}another --output-dir; or --overwrite"
        raise InvalidSetting(
            f"--output-dir {config.output_dir}: an earlier run left {names}; use {expected}",
            field="--output-dir", value=str(config.output_dir), expected=expected,
        )  # fmt: skip


def used(config: Run) -> list[Path]:
    """Returns the results of an earlier run that this one would replace; a run that only evaluates replaces none."""
    if config.launcher.num_rollout == 0:
        return []
    candidates = [config.output_dir / name for name in (*FILES, MODEL)]
    results = [path for path in candidates if path.is_dir() or (path.is_file() and path.stat().st_size)]
    results += [config.output_dir / SAMPLES] if kept_files(config.output_dir) else []
    results += checkpoints.steps(config.checkpoint_dir).values()
    results += writable.exports(config.flat)
    for name in writable.DUMPS:
        results += writable.dumps(config.flat, name)
    return results


def resumes(config: Run) -> bool:
    """Returns whether --load names the directory of this run's checkpoints, or a checkpoint in it."""
    load = config.flat.get("load_root")
    if load is None:
        return False
    if checkpoints.loads_nothing(load, config.trainer.load) and (config.output_dir / MODEL).exists():
        return False  # the earlier run finished and left nothing to load
    path = Path(os.path.realpath(load))
    return any(path.is_relative_to(os.path.realpath(place)) for place in (config.checkpoint_dir, config.output_dir))


def begins_anew(config: Run) -> str | None:
    """Returns a sentence about a run whose --load holds no checkpoint yet; None for any other run."""
    root, load = config.flat.get("load_root"), config.trainer.load
    if not checkpoints.loads_nothing(root, load):
        return None
    sentence = f"--load {root}: no checkpoint yet, training starts from the beginning"
    if load is not None:
        sentence += f", with the weights of {load} and a new optimizer"
    if os.path.realpath(str(root)) != os.path.realpath(config.checkpoint_dir):
        sentence += f"; to resume this run later, give it --load {shlex.quote(str(config.checkpoint_dir))}"
    return sentence


def overwrite(config: Run) -> None:
    """Removes the results of an earlier run that this one would otherwise mix with its own.

    Files that slime did not write stay. Exports and dumps are replaced one by one as the run writes them.
    """
    for name in FILES:
        path = config.output_dir / name
        if path.is_file():
            path.unlink()
    remove_kept(config.output_dir)
    (config.output_dir / STATE).unlink(missing_ok=True)
    if config.tensorboard_dir is not None:
        for path in config.tensorboard_dir.glob("events.out.tfevents.*"):
            path.unlink()
    for path in (config.output_dir / MODEL, *checkpoints.steps(config.checkpoint_dir).values()):
        if path.exists():
            remove_directory(path, field="--overwrite")
    (config.checkpoint_dir / checkpoints.TRACKER).unlink(missing_ok=True)
