"""`slime resume RUN`: continues from the newest checkpoint of a run, with its settings and its command."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from slime.launcher.cli.recorded_run import RecordedRun, read_run
from slime.launcher.config.help import CommandParser
from slime.launcher.config.record import SETTINGS
from slime.launcher.run_directory.checkpoints import steps
from slime.launcher.run_directory.state import read_state
from slime.types.errors import InvalidSetting, SlimeError

# Flags that make a finished run longer.
LONGER = ("--num-rollout", "--num-epoch")


def parser(command: str) -> CommandParser:
    reader = CommandParser(
        prog="slime resume",
        usage="slime resume RUN [flags of slime train]",
        description="Continues from the newest checkpoint of a run, with its settings, in the directory in which it "
        "was started. Flags take precedence over those settings. A run that is alive is refused; a finished run "
        "continues with a larger --num-rollout.",
    )
    reader.add_argument("run", metavar="RUN", help="Output directory of a run that had --save-interval")
    return reader


def main(command: str, argv: Sequence[str]) -> int:
    try:
        options, flags = parser(command).parse_known_args(list(argv))
        run = read_run(Path(options.run))
        words = resumed(run, flags)
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2
    os.chdir(run.started_in)
    from slime.launcher.cli.train import run_train

    return run_train(words, asynchronous=read_state(run.path).command == "train-async")


def resumed(run: RecordedRun, flags: Sequence[str]) -> list[str]:
    """Returns the arguments of `slime train` that continue `run`.

    Raises InvalidSetting for a run that is alive, has finished or has no checkpoint, and for a --num-rollout below the
    iterations that it has.
    """
    state = read_state(run.path)
    if state.state == "running":
        raise InvalidSetting(
            f"RUN {run.path} is alive: process {state.pid} on {state.host}, {state.phase}; stop it first",
            field="RUN", value=str(run.path), expected="a run that has stopped",
        )  # fmt: skip
    if state.state == "done" and not {word.split("=", 1)[0] for word in flags} & set(LONGER):
        count = f" after {state.num_steps} iterations" if state.num_steps else ""
        raise InvalidSetting(
            f"RUN {run.path} finished{count}; to continue it, give a larger --num-rollout",
            field="RUN", value=str(run.path), expected="--num-rollout",
        )  # fmt: skip
    wanted, trained = _num_rollout(flags), max(steps(run.checkpoints), default=-1) + 1
    if wanted is not None and 0 < wanted < trained + (state.state == "done"):
        raise InvalidSetting.must_be(
            "--num-rollout", f"more than the {trained} iterations that RUN {run.path} has", got=wanted
        )
    if not steps(run.checkpoints):
        raise InvalidSetting(
            f"RUN {run.path} has no checkpoint to continue from: {run.why_unsaved}; to start it over: slime train "
            f"{shlex.quote(str(run.path / SETTINGS))} --output-dir ANOTHER",
            field="RUN", value=str(run.path), expected="a run with a checkpoint",
        )  # fmt: skip
    words = ["--config", str(run.path / SETTINGS), "--output-dir", str(run.path), "--load", str(run.checkpoints)]
    if run.run_name is not None:
        words += ["--run-name", run.run_name]
    if run.settings.get("ckpt_step") is not None:
        # An earlier resume chose a step; this one takes the newest.
        words += ["--ckpt-step", str(max(steps(run.checkpoints)))]
    return [*words, *flags]


def _num_rollout(flags: Sequence[str]) -> int | None:
    """Returns the iterations that the flags ask for; None without such a flag or a whole number."""
    found = ""
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--num-rollout":
            found = value or following
    return int(found) if found.isdecimal() else None
