"""Checks the flags of the training loop, and sets those that others imply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.launcher.config.catalogue import as_typed
from slime.rollout.recordings.paths import check_template as check_recording_path
from slime.rollout.recordings.paths import path_of
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE, DEFAULT_ROLLOUT_FUNCTION, RolloutSettings
from slime.trainer.settings.debug import check_template as check_train_data
from slime.types.errors import InvalidSetting

ROLLOUT_DUMP = "rollout_data/{rollout_id}.rollout"
TRAIN_DUMP = "train_data/{rollout_id}_{rank}.safetensors"
# The original's name for --fully-async.
FULLY_ASYNC_FUNCTION = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
MAX_STALENESS = 2
# Settings that need an iteration with a beginning and an end, and the reason.
OF_ONE_ITERATION = {
    "rollout_sample_filter_path": "it sees the groups of an iteration before any of them is complete",
    "rollout_all_samples_process_path": "it sees all groups of an iteration, and no call generates those of one",
    "custom_rollout_log_function_path": "it logs the samples that one call generated",
    "save_debug_rollout_data": "it records the samples that one call generated",
}


def imply_debugging(values: dict[str, Any]) -> None:
    """Sets the settings in `values`, by name, that --load-debug-rollout-data and --dump-details stand for.

    A dump whose path was given keeps it.
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
    for name in ("max_staleness", "staleness_policy"):
        if args[name] is not None and not args["fully_async"]:
            raise InvalidSetting.requires(as_typed(name, args[name]), "--fully-async")
    _check_halves(args)


def staleness_bound(args: Mapping[str, Any]) -> int:
    """Returns --max-staleness or its default."""
    return MAX_STALENESS if args["max_staleness"] is None else int(args["max_staleness"])


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
    check_train_data(args["save_debug_train_data"], args["actor_num_nodes"] * args["actor_num_gpus_per_node"])


def _check_replay(args: Mapping[str, Any]) -> None:
    if args["num_epoch"] is not None:
        raise _conflict(
            args, "num_epoch", "debug_train_only", "--num-rollout says how many recorded rollouts to train on"
        )
    if args["save_debug_rollout_data"]:
        raise _conflict(args, "save_debug_rollout_data", "debug_train_only", "nothing is generated")
    check_recording_path("--load-debug-rollout-data", args["load_debug_rollout_data"])


def check_recordings(args: Mapping[str, Any]) -> None:
    """Raises MissingFile or InvalidFile if the number of the first recorded rollout is known and there is no recording
    in its file."""
    template, first = args["load_debug_rollout_data"], args["start_rollout_id"]
    if template is None or (first is None and args["load"] is not None):
        return
    from slime.rollout.recordings.rollouts import check_beginning

    check_beginning(path_of(template, first or 0), "--load-debug-rollout-data")


def check_asynchronous(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for settings that require generation and training to take turns."""
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
    if args["fully_async"]:
        _check_fully_async(args)
    elif args["deterministic"] and (args["async_buffer_size"] or 1) > 1:
        raise _conflict(
            args, "deterministic", "async_buffer_size",
            "with more than 1, timing decides which weights make a rollout",
        )  # fmt: skip


def _check_fully_async(args: Mapping[str, Any]) -> None:
    bound = staleness_bound(args)
    if args["rollout_function_path"] not in (DEFAULT_ROLLOUT_FUNCTION, FULLY_ASYNC_FUNCTION):
        raise _conflict(
            args, "rollout_function_path", "fully_async",
            "a rollout function generates one iteration; --custom-generate-function-path works with both",
        )  # fmt: skip
    if args["data_source_path"] != DEFAULT_DATA_SOURCE:
        raise _conflict(args, "data_source_path", "fully_async", "its class gives groups to one iteration at a time")
    if args["async_buffer_size"] is not None:
        raise _conflict(
            args, "async_buffer_size", "fully_async", "generation is not cut into rollouts; use --max-staleness"
        )
    if args["rollout_prompt_wait_seconds"] != RolloutSettings.rollout_prompt_wait_seconds:
        raise _conflict(
            args, "rollout_prompt_wait_seconds", "fully_async",
            "generation waits for prompts as long as the trainer waits for groups; use --rollout-timeout-seconds",
        )  # fmt: skip
    for name, reason in OF_ONE_ITERATION.items():
        if args[name]:
            # --dump-details sets this, too, so the error names the flag that was given.
            named = "dump_details" if name == "save_debug_rollout_data" and args["dump_details"] else name
            raise _conflict(args, named, "fully_async", reason)
    for name in ("debug_rollout_only", "debug_train_only"):
        if args[name]:
            raise _conflict(args, name, "fully_async", "generation and training pace each other")
    if bound < args["update_weights_interval"] - 1:
        raise InvalidSetting.must_be(
            as_typed("update_weights_interval", args["update_weights_interval"]).split()[0],
            f"at most {bound + 1}, so that samples are no older than --max-staleness {bound}",
            got=args["update_weights_interval"],
        )
    if args["deterministic"] and bound > 0:
        raise InvalidSetting.requires(
            "--deterministic with --fully-async", "--max-staleness 0", "timing decides which weights make a token"
        )


def check_synchronous(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for settings that only asynchronous training has."""
    if args["fully_async"]:
        by_name = args["rollout_function_path"] == FULLY_ASYNC_FUNCTION
        name = f"--rollout-function-path {FULLY_ASYNC_FUNCTION}" if by_name else "--fully-async"
        raise InvalidSetting.requires(name, "slime train-async", "slime train generates and trains in turns")
    if args["async_buffer_size"] is not None:
        raise InvalidSetting.requires(
            as_typed("async_buffer_size", args["async_buffer_size"]), "slime train-async", "slime train has no prefetch"
        )


def _conflict(args: Mapping[str, Any], first: str, second: str, reason: str) -> InvalidSetting:
    return InvalidSetting.conflict(as_typed(first, args[first]), as_typed(second, args[second]), reason)
