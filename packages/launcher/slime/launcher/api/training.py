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
from slime.launcher.doctor.preflight import check_start
from slime.launcher.platform.signals import terminate_as_interrupt
from slime.launcher.run_directory.earlier_run import check_unused
from slime.launcher.runner.ray_job import module_path, run_attached
from slime.types.directories import path_errors
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
    model = _path(model, "model")
    output = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
    output = (output if output_dir is None else Path(_path(output_dir, "output_dir"))).absolute()
    inputs = Inputs.of_run(output, overwrite=settings.get("overwrite") is True)
    with inputs.removed_on_error():
        values = plain_settings(settings) | {"hf_checkpoint": model, "output_dir": str(output)}
        values["prompt_data"] = _data(data, inputs, "prompts", "data")
        if eval_data is not None:
            sets = eval_data if isinstance(eval_data, Mapping) else {"eval": eval_data}
            for name in sets:
                if not isinstance(name, str):
                    raise InvalidSetting.must_be("eval_data", "sets by name, which is text", got=name)
            values["eval_prompt_data"] = [
                [name, _data(rows, inputs, "eval-" + re.sub(r"[^\w.-]", "_", name), f"eval_data {name}")]
                for name, rows in sets.items()
            ]
        values |= _reward(reward, inputs)
        with path_errors(inputs.directory, "output_dir"):
            inputs.directory.mkdir(parents=True, exist_ok=True)
        config = inputs.directory / "settings.yaml"
        write_whole(config, yaml.safe_dump(values, sort_keys=True), field="output_dir")
        # Checked here as well, so that what is wrong is an exception; the process could only print it.
        try:
            parsed = run_config.parse([str(config)])
            check_unused(parsed)
            check_start(parsed)
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


def _path(path: str | os.PathLike[str], argument: str) -> str:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise InvalidSetting.must_be(argument, "a path", got=path)
    return os.fspath(path)


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
