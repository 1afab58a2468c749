"""`train`: runs `slime train` from a script or a notebook, and returns its results."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from slime.launcher.api.inputs import Inputs, plain_settings
from slime.launcher.api.reward_file import reward_path
from slime.launcher.api.trained_run import TrainedRun
from slime.launcher.config import run_config
from slime.launcher.platform.signals import terminate_as_interrupt
from slime.launcher.runner.ray_job import module_path, run_attached
from slime.types.errors import ConfigError, InvalidSetting
from slime.types.files import write_whole

Data = str | os.PathLike[str] | Sequence[Mapping[str, Any]]


def train(
    model: str | os.PathLike[str],
    data: Data,
    reward: Callable[..., Any] | str | None = None,
    *,
    eval_data: Data | Mapping[str, Data] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    asynchronous: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Trains `model` in separate processes, prints the progress, and returns when the training has ended.

    model: a directory, or a name on the Hub.
    data: a file of prompts, a name on the Hub, or a list of rows, which are written to `output_dir`/inputs.
    reward: a function `(args, sample, **kwargs)`, plain or async, which may be defined in a script or a notebook; or
        the name of a built-in reward ("math"), or "FILE.py:FUNCTION". None: each row names its reward.
    eval_data: like `data`, or a mapping from names to evaluation sets.
    output_dir: the directory of the run (default: runs/TIME).
    asynchronous: runs `slime train-async` instead of `slime train`.
    settings: any other setting by its name in docs/flags.md: num_rollout=100, lr=1e-6, preset="dapo".

    Raises ConfigError for wrong settings before anything starts, and RunFailed if the training fails. An interrupt
    stops the run and raises KeyboardInterrupt.
    """
    _refuse_doubles(settings, reward=reward is not None, eval_data=eval_data is not None)
    output = Path(output_dir or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}").absolute()
    inputs = Inputs.of_run(output, overwrite=settings.get("overwrite") is True)
    values = plain_settings(settings) | {"hf_checkpoint": os.fspath(model), "output_dir": str(output)}
    values["prompt_data"] = _data(data, inputs, "prompts", "data")
    if eval_data is not None:
        sets = eval_data if isinstance(eval_data, Mapping) else {"eval": eval_data}
        values["eval_prompt_data"] = [
            [name, _data(rows, inputs, "eval-" + re.sub(r"[^\w.-]", "_", name), f"eval_data {name}")]
            for name, rows in sets.items()
        ]
    values |= _reward(reward, inputs)
    inputs.directory.mkdir(parents=True, exist_ok=True)
    config = inputs.directory / "settings.yaml"
    write_whole(config, yaml.safe_dump(values, sort_keys=True), field="output_dir")
    # Parsed here as well, so that wrong settings are exceptions; the process could only print them.
    try:
        run_config.parse([str(config)])
    except ConfigError as error:
        # The file is ours; who called gave arguments.
        raise error.restore(
            error.message.removeprefix(f"--config {config}: "),
            field=error.field, value=error.value, expected=error.expected,
        ) from None  # fmt: skip
    command = [sys.executable, "-m", "slime.launcher.cli", "train-async" if asynchronous else "train", str(config)]
    with terminate_as_interrupt():
        run_attached(command, "the training", {"PYTHONPATH": module_path()}, show=None if _on_our_output() else print)
    return TrainedRun(output)


def _refuse_doubles(settings: Mapping[str, Any], *, reward: bool, eval_data: bool) -> None:
    arguments = {"hf_checkpoint": "model", "prompt_data": "data"}
    arguments |= {"custom_rm_path": "reward", "rm_type": "reward"} if reward else {}
    arguments |= {"eval_prompt_data": "eval_data"} if eval_data else {}
    for name in settings.keys() & arguments.keys():
        raise InvalidSetting.conflict(name, arguments[name], "both set the same thing")


def _data(data: Data, inputs: Inputs, name: str, argument: str) -> str:
    if isinstance(data, (str, os.PathLike)):
        return os.fspath(data)
    return str(inputs.write_rows(f"{name}.jsonl", data, argument))


def _reward(reward: Callable[..., Any] | str | None, inputs: Inputs) -> dict[str, str]:
    if reward is None:
        return {}
    if callable(reward):
        return {"custom_rm_path": reward_path(reward, inputs)}
    if not isinstance(reward, str):
        raise InvalidSetting.must_be("reward", "a function or a name", got=reward)
    return {"custom_rm_path" if ":" in reward or "." in reward else "rm_type": reward}


def _on_our_output() -> bool:
    """Returns whether a child process writes to the same place as `print`; in a notebook it does not."""
    try:
        return sys.stdout.fileno() == 1
    except (OSError, ValueError, AttributeError):
        return False
