"""Checks the flags of the training loop, and sets those that others imply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.launcher.config.catalogue import as_typed
from slime.rollout.settings.rollout import DEFAULT_ROLLOUT_FUNCTION
from slime.types.errors import InvalidSetting
from slime.types.files import check_readable

ROLLOUT_DUMP = "rollout_data/{rollout_id}.rollout"
TRAIN_DUMP = "train_data/{rollout_id}_{rank}.safetensors"


def imply_debugging(values: dict[str, Any]) -> None:
    """Sets in `values`, settings by name, the flags that --load-debug-rollout-data and --dump-details stand for.

    A dump with a path of its own keeps it.
    """
    if values.get("load_debug_rollout_data"):
        values["debug_train_only"] = True
    directory = values.get("dump_details")
    if isinstance(directory, str):
        # A half that is switched off has nothing to dump.
        if not values.get("debug_train_only"):
            values.setdefault("save_debug_rollout_data", f"{directory}/{ROLLOUT_DUMP}")
        if not values.get("debug_rollout_only"):
            values.setdefault("save_debug_train_data", f"{directory}/{TRAIN_DUMP}")


def check_loop(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for flags of the loop that do not fit together; `args` has every setting by its name."""
    if args["num_rollout"] is None and args["num_epoch"] is None:
        raise InvalidSetting.required("--num-rollout", "the number of iterations to run, or --num-epoch in its place")
    if args["num_rollout"] is not None and args["num_epoch"] is not None:
        raise _conflict(args, "num_epoch", "num_rollout", "both set the length of the run")
    if args["num_epoch"] is not None and args["prompt_data"] is None:
        raise InvalidSetting.requires(as_typed("num_epoch", args["num_epoch"]), "--prompt-data", "its rows are counted")
    if args["num_epoch"] is not None and not args["rollout_global_dataset"]:
        raise _conflict(args, "num_epoch", "rollout_global_dataset", "prompts that clients add cannot be counted")
    first, stop = args["start_rollout_id"], args["num_rollout"]
    if first and stop is not None and first > stop:
        raise InvalidSetting.must_be("--start-rollout-id", f"at most --num-rollout {stop}", got=first)
    if stop == 0 and args["skip_eval_before_train"]:
        raise _conflict(args, "skip_eval_before_train", "num_rollout", "there would be nothing to do")
    if args["update_weights_interval"] > 1 and _offloads(args):
        raise _conflict(
            args, "update_weights_interval", "colocate" if args["offload_rollout"] is None else "offload_rollout",
            "engines that give their memory back have no weights until the next push",
        )  # fmt: skip
    _check_halves(args)


def _offloads(args: Mapping[str, Any]) -> bool:
    return args["colocate"] if args["offload_rollout"] is None else args["offload_rollout"]


def _check_halves(args: Mapping[str, Any]) -> None:
    if args["debug_rollout_only"] and args["debug_train_only"]:
        half = "load_debug_rollout_data" if args["load_debug_rollout_data"] else "debug_train_only"
        raise _conflict(args, "debug_rollout_only", half, "each leaves out the other half of the system")
    if args["debug_train_only"]:
        if args["num_rollout"] == 0:
            raise _conflict(args, "num_rollout", "debug_train_only", "nothing is evaluated, so nothing is left to do")
        if args["load_debug_rollout_data"]:
            _check_replay(args)
        elif args["rollout_function_path"] == DEFAULT_ROLLOUT_FUNCTION:
            raise InvalidSetting.requires(
                "--debug-train-only",
                "--load-debug-rollout-data PATH or --rollout-function-path",
                "there are no engines, which the default rollout function generates with",
            )
    elif args["load_debug_rollout_data_subsample"] is not None:
        raise InvalidSetting.requires(
            as_typed("load_debug_rollout_data_subsample", args["load_debug_rollout_data_subsample"]),
            "--load-debug-rollout-data PATH",
        )
    if args["debug_rollout_only"]:
        for name in ("save_interval", "save_debug_train_data"):
            if args[name]:
                raise _conflict(args, name, "debug_rollout_only", "there is no trainer")


def _check_replay(args: Mapping[str, Any]) -> None:
    if args["num_epoch"] is not None:
        raise _conflict(
            args, "num_epoch", "debug_train_only", "--num-rollout says how many recorded rollouts to train on"
        )
    if args["save_debug_rollout_data"]:
        raise _conflict(args, "save_debug_rollout_data", "debug_train_only", "nothing is generated")
    from slime.rollout.recordings.rollouts import check_template

    check_template("--load-debug-rollout-data", args["load_debug_rollout_data"], required=False)


def check_recordings(args: Mapping[str, Any]) -> None:
    """Raises MissingFile where the first recorded rollout does not exist, if it is known which one that is."""
    template, first = args["load_debug_rollout_data"], args["start_rollout_id"]
    if template is None or (first is None and args["load"] is not None):
        return
    from slime.rollout.recordings.rollouts import path_of

    check_readable(path_of(template, first or 0), "--load-debug-rollout-data")


def check_asynchronous(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for settings with which generation and training must take turns."""
    turns = "engines and trainer work at the same time"
    for name in ("colocate", "offload_rollout", "offload_train"):
        if args.get(name):
            raise InvalidSetting.conflict(as_typed(name, args[name]), "slime train-async", f"{turns}; use slime train")
    if args.get("true_on_policy_mode"):
        raise InvalidSetting.conflict(
            "--true-on-policy-mode",
            "slime train-async",
            "asynchronous training uses samples of older weights; use slime train",
        )
    if args["deterministic"] and (args["async_buffer_size"] or 1) > 1:
        raise _conflict(
            args, "deterministic", "async_buffer_size",
            "with more than 1, timing decides which weights make a rollout",
        )  # fmt: skip


def check_synchronous(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for settings that only asynchronous training has."""
    if args["async_buffer_size"] is not None:
        raise InvalidSetting.requires(
            as_typed("async_buffer_size", args["async_buffer_size"]), "slime train-async", "slime train has no prefetch"
        )


def _conflict(args: Mapping[str, Any], first: str, second: str, reason: str) -> InvalidSetting:
    return InvalidSetting.conflict(as_typed(first, args[first]), as_typed(second, args[second]), reason)
