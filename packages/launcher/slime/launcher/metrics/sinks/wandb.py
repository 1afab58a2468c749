"""Sends metrics to Weights & Biases, through the package `wandb`.

The key comes from WANDB_API_KEY or `wandb login`. A key on the command line is moved into the environment before
anything logs it.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.launcher.metrics.sinks.base import Metrics, Sink, TrackedRun
from slime.types.errors import InvalidSetting
from slime.types.settings import setting

log = logging.getLogger(__name__)

UPDATES = "train/step"
KEY_FLAG, KEY_VARIABLE = "--wandb-key", "WANDB_API_KEY"


@dataclass(kw_only=True)
class WandbSettings:
    """Settings of Weights & Biases."""

    use_wandb: bool = setting(False, "Send metrics to Weights & Biases (requires the package wandb)")
    wandb_mode: str | None = setting(
        None,
        "Mode of Weights & Biases: send metrics, keep them in files, or do nothing (default: online)",
        choices=("online", "offline", "disabled"),
    )
    wandb_dir: str | None = setting(None, "Directory of W&B's files (default: --output-dir)", metavar="DIR")
    wandb_host: str | None = setting(None, "URL of the W&B server, http://... (default: W&B's own)", metavar="URL")
    wandb_team: str | None = setting(None, "W&B entity that the run belongs to", metavar="NAME")
    wandb_group: str | None = setting(None, "W&B group of the run, and the beginning of the run's name", metavar="NAME")
    wandb_project: str | None = setting(None, "W&B project of the run", metavar="NAME")
    wandb_run_id: str | None = setting(
        None, "W&B id of the run; a run with this id is resumed if it exists", metavar="ID"
    )
    wandb_random_suffix: bool = setting(
        True,
        "Add random letters to the run's W&B name",
        off_flag="disable-wandb-random-suffix",
        off_help="Leave the run's W&B name without random letters at its end",
    )
    wandb_always_use_train_step: bool = setting(
        False, "Draw every W&B chart over train/step, which counts updates, in place of iterations"
    )


def check_wandb(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for a --wandb-host that is not a URL."""
    host = args["wandb_host"]
    if host is not None and not host.startswith(("http://", "https://")):
        raise InvalidSetting.must_be("--wandb-host", "http://... or https://...", got=host)


class Wandb(Sink):
    """One run of Weights & Biases."""

    def __init__(self, settings: WandbSettings, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        name = settings.wandb_group or run.name
        if settings.wandb_random_suffix:
            name += f"-{secrets.token_hex(3)}"
        options = {"base_url": settings.wandb_host} if settings.wandb_host else {}
        self._run = wandb.init(
            project=settings.wandb_project,
            entity=settings.wandb_team,
            group=settings.wandb_group,
            name=name,
            dir=settings.wandb_dir or str(run.output_dir),
            mode=settings.wandb_mode,
            id=settings.wandb_run_id,
            resume="allow" if settings.wandb_run_id else None,
            config=dict(run.config),
            settings=wandb.Settings(**options),
        )
        self._over_updates = settings.wandb_always_use_train_step
        self._updates: float | None = None
        if self._over_updates:
            self._run.define_metric("*", step_metric=UPDATES)

    def write(self, step: int, metrics: Metrics) -> None:
        row = dict(metrics)
        if self._over_updates:
            # An evaluation is of the updates before it. A resumed run learns their number from its first iteration.
            self._updates = row.get(UPDATES, 0.0 if step == 0 and self._updates is None else self._updates)
            if self._updates is not None:
                row[UPDATES] = self._updates
        self._run.log(row, step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def take_key(argv: Sequence[str]) -> list[str]:
    """Returns the command line without --wandb-key; puts the key into WANDB_API_KEY of this process, with a warning.

    Raises InvalidSetting for the flag without a value.
    """
    words, rest = list(argv), []
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag != KEY_FLAG:
            rest.append(word)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise InvalidSetting.requires(KEY_FLAG, "one value")
            value = words.pop(0)
        os.environ[KEY_VARIABLE] = value
        log.warning(
            "%s: users of this machine can read it in the list of processes; set %s instead", KEY_FLAG, KEY_VARIABLE
        )
    return rest
