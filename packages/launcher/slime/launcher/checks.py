"""What can be wrong with a whole run, found before anything of it starts.

Contradictions inside one package are that package's own; here are those between packages, the files, and the plug-ins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.launcher.declared import declared
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable
from slime.types.plugins import load_plugin

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
ROW_SLICE = re.compile(r"@\[-?\d*:-?\d*\]$")

# Plug-in -> the positional arguments that it is called with.
PLUGINS: dict[str, tuple[str, ...]] = {
    "rollout_function_path": ("args", "rollout_id", "data_source"),
    "eval_function_path": ("args", "rollout_id", "data_source"),
    "dynamic_sampling_filter_path": ("args", "group"),
    "rollout_sample_hook_path": ("args", "sample"),
    "rollout_sample_filter_path": ("args", "groups"),
    "rollout_all_samples_process_path": ("args", "groups", "get_samples"),
    "custom_rollout_log_function_path": ("rollout_id", "args", "samples", "extra_metrics", "rollout_time"),
    "custom_eval_rollout_log_function_path": ("rollout_id", "args", "data", "extra_metrics"),
    "custom_rm_path": ("args", "sample"),
    "custom_reward_post_process_path": ("args", "samples"),
    "custom_advantage_function_path": ("args", "rollout_data"),
    "custom_loss_function_path": ("args", "batch", "logits", "sum_of_sample_mean"),
    "custom_pg_loss_reducer_function_path": (
        "total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss",
    ),
    "custom_megatron_init_path": ("args",),
    "custom_megatron_before_log_prob_hook_path": ("args", "model", "store_prefix"),
    "custom_megatron_before_train_step_hook_path": (
        "args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler",
    ),
}  # fmt: skip
# Called by keyword, or in one of two shapes: loaded here, held to their contract by the package that calls them.
LOADED_ONLY = (
    "custom_generate_function_path",
    "custom_tis_function_path",
    "buffer_filter_path",
    "custom_model_provider_path",
)


def check_run(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting or NotAvailable for settings that do not fit together; `args` is flat."""
    if args["num_rollout"] is None:
        raise InvalidSetting("--num-rollout is required: how many rollouts to run", field="--num-rollout")
    if args["prompt_data"] is None and args["rollout_global_dataset"] and args["num_rollout"] > 0:
        raise InvalidSetting(
            "--prompt-data is required; with --disable-rollout-global-dataset clients of the buffer add them",
            field="--prompt-data",
            expected="a jsonl or parquet file",
        )
    for name in ("eval_interval", "skip_eval_before_train"):
        if args[name] and not args["eval_prompt_data"]:
            _needs(name, args[name], "--eval-prompt-data")
    if args["num_rollout"] == 0 and not args["eval_prompt_data"]:
        _needs("num_rollout", 0, "--eval-prompt-data: there is nothing to do")
    for name in ("save", "save_hf", "save_keep", "save_retain_interval", "async_save"):
        if args[name] and args["save_interval"] is None:
            _needs(name, args[name], "--save-interval")
    for name, other in (("ckpt_step", "load"), ("ref_ckpt_step", "ref_load")):
        if args[name] is not None and args[other] is None:
            _needs(name, args[name], "--" + other.replace("_", "-"))
    _check_template("--save-hf", args["save_hf"])
    for name, value in args["train_env_vars"].items():
        if not isinstance(value, str):
            raise InvalidSetting(
                f"--train-env-vars: {name}: got {value!r}, expected text", field="--train-env-vars", value=value
            )
    if args["actor_num_nodes"] > 1:
        raise NotAvailable(
            f"--actor-num-nodes {args['actor_num_nodes']} is not available yet: a trainer on several nodes",
            field="--actor-num-nodes",
            value=args["actor_num_nodes"],
            expected="1",
        )
    _check_batch(args)


def _check_template(flag: str, path: str | None) -> None:
    try:
        (path or "").format(rollout_id=0)
    except (KeyError, IndexError, ValueError) as error:
        raise InvalidSetting(
            f"{flag} {path}: {type(error).__name__}: {error}; expected {{rollout_id}} to be its only field",
            field=flag,
            value=path,
            expected="{rollout_id}",
        ) from None


def _needs(name: str, value: Any, other: str) -> None:
    flag = "--" + name.replace("_", "-")
    shown = flag if value is True else f"{flag} {value}"
    raise InvalidSetting(f"{shown} needs {other}", field=flag, value=value, expected=other)


def _check_batch(args: Mapping[str, Any]) -> None:
    samples = args["rollout_batch_size"] * args["n_samples_per_prompt"]
    for name in ("global_batch_size", "num_steps_per_rollout"):
        value = args[name]
        if value is not None and samples % value:
            flag = "--" + name.replace("_", "-")
            raise InvalidSetting(
                f"{flag} {value}: does not divide --rollout-batch-size {args['rollout_batch_size']} x "
                f"--n-samples-per-prompt {args['n_samples_per_prompt']} = {samples}",
                field=flag,
                value=value,
                expected=f"a divisor of {samples}",
            )


def check_files(args: Mapping[str, Any], evaluation_sets: Mapping[str, str]) -> None:
    """Raises MissingFile or InvalidFile naming the flag; nothing is read beyond what tells that a file is there."""
    for name in ("hf_checkpoint", "ref_load"):
        if args[name] is not None:
            _check_model("--" + name.replace("_", "-"), Path(args[name]), tokenizer=name == "hf_checkpoint")
    if args["load"] is not None and not Path(args["load"]).is_dir():
        raise MissingFile(f"--load: no such directory {args['load']}", field="--load", value=args["load"])
    if args["prompt_data"] is not None and args["rollout_global_dataset"]:
        _check_prompts("--prompt-data", args["prompt_data"])
    for name, path in evaluation_sets.items():
        _check_prompts(f"--eval-prompt-data {name}", path)


def _check_prompts(flag: str, path: str) -> None:
    file = Path(ROW_SLICE.sub("", path))
    if not file.is_file():
        raise MissingFile(f"{flag}: no such file {file}", field=flag, value=path, expected="a jsonl or parquet file")


def _check_model(flag: str, directory: Path, *, tokenizer: bool) -> None:
    value = str(directory)
    if not directory.is_dir():
        raise MissingFile(
            f"{flag}: no such directory {directory}", field=flag, value=value, expected="a Hugging Face model directory"
        )
    if not (directory / "config.json").is_file():
        raise InvalidFile(f"{flag}: {directory} has no config.json", field=flag, value=value, expected="config.json")
    if tokenizer and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidFile(
            f"{flag}: {directory} has no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}",
            field=flag,
            value=value,
            expected="tokenizer.json",
        )


def check_plugins(args: Mapping[str, Any]) -> None:
    """Loads every plug-in that is set and holds it against its contract; raises PluginError."""
    flags = declared()
    for name, parameters in PLUGINS.items():
        value = args.get(name)
        if name in flags and value and value != flags[name].default:
            for path in value if isinstance(value, list) else [value]:
                load_plugin(path, flag=flags[name].spelling, parameters=parameters)
    for name in LOADED_ONLY:
        if args.get(name):
            load_plugin(args[name], flag="--" + name.replace("_", "-"))
