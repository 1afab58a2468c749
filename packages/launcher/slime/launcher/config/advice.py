"""Finds settings of a run that have no effect, or are valid and probably not what was meant."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from slime.launcher.config.catalogue import as_typed, declared
from slime.launcher.config.checks.loop import staleness_bound
from slime.launcher.config.derived import other_defaults
from slime.launcher.platform import probes
from slime.launcher.run_directory.checkpoints import begins_with_reference
from slime.rollout.recordings.paths import path_of
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE, DEFAULT_ROLLOUT_FUNCTION
from slime.rollout.settings.served_models import trained_server_args
from slime.trainer.algorithms.estimators import find_estimator
from slime.trainer.settings import checks as trainer
from slime.trainer.settings.algorithm import AlgorithmSettings
from slime.types.errors import InvalidSetting
from slime.types.setting_values import flag_name

if TYPE_CHECKING:
    from slime.launcher.config.run_config import RunConfig

# A variable of the original system: its trainer computes with weights that are rounded to INT4.
FAKE_INT4 = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"

Condition = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Effect:
    """The condition on all settings, by name, under which something reads the settings in `names`.

    needs: the flags that meet the condition, in words. refused: whether setting one of `names` without it is an error;
    it is only a warning for settings that scripts of the original system set for every run.
    """

    names: tuple[str, ...]
    needs: str
    holds: Condition
    refused: bool = False

    def without(self, config: RunConfig) -> Iterator[str]:
        """Yields the names of the settings that were set and that nothing reads."""
        for name in self.names:
            if _is_set(config, name) and not self.holds(config.flat):
                yield name


@dataclass(frozen=True)
class Mode:
    """A part of the system that a mode leaves out, and the settings that only that part reads."""

    reason: str
    holds: Condition
    names: frozenset[str]


def _is_set(config: RunConfig, name: str) -> bool:
    """Returns whether the user set a setting to another value than its default."""
    value = config.explicit.get(name)
    if value is None or name in config.inherited:
        return False
    # Spelling out a number or a switch as it is by default has no effect anywhere, so it needs no warning.
    default = declared()[name].default
    return value not in ({}, []) and (isinstance(value, str) and value != "" or value != default)


def _spelled(config: RunConfig, name: str) -> str:
    """Spells a setting as the user set it: by a flag, a variable or a preset."""
    value = config.explicit[name]
    if isinstance(value, dict) and name.endswith("_args"):
        typed = " ".join(f"{flag_name(name.removesuffix('args') + key)} {item}" for key, item in value.items())
    else:
        typed = as_typed(name, " ".join(map(_word, value)) if isinstance(value, list) else value)
    source = config.origins.get(name)
    return typed if source is None else f"{typed} (from {source})"


def _word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _on(name: str, *values: Any) -> Condition:
    """Returns whether a setting has one of these values; without any, whether it is on or set."""
    return (lambda args: args[name] in values) if values else (lambda args: args[name])


def _any(*conditions: Condition) -> Condition:
    return lambda args: any(condition(args) for condition in conditions)


_DISK = _on("update_weight_transport", "disk")
_CORRECTS = _any(_on("use_tis"), _on("get_mismatch_metrics"))
_OWN_LOSS = _on("loss_type", "custom_loss")
_OWN_ROLLOUT: Condition = lambda args: args["rollout_function_path"] != DEFAULT_ROLLOUT_FUNCTION  # noqa: E731
_OWN_SOURCE: Condition = lambda args: args["data_source_path"] != DEFAULT_DATA_SOURCE  # noqa: E731
_STARTS_ENGINES: Condition = lambda args: not args["rollout_external_engine_addrs"]  # noqa: E731
# The run's settings name the reference as what it loads; those that the doctor reads do not yet.
_FROM_REFERENCE: Condition = lambda args: (  # noqa: E731
    begins_with_reference(args) or (args["ref_load"] is not None and args["load"] == args["ref_load"])
)
_RESTARTS: Condition = lambda args: args["use_fault_tolerance"] is not False  # noqa: E731

EFFECTS = (
    Effect(
        ("update_weight_delta_encoding", "update_weight_delta_checksum"), "--update-weight-mode delta",
        _on("update_weight_mode", "delta"), refused=True,
    ),
    Effect(
        ("update_weight_disk_dir",), "--update-weight-transport disk or --check-weight-update-equal",
        _any(_DISK, _on("check_weight_update_equal")), refused=True,
    ),
    Effect(
        ("update_weight_disk_keep_files", "custom_update_weight_post_write_path"), "--update-weight-transport disk",
        _DISK, refused=True,
    ),
    Effect(
        (
            "rollout_num_engines", "rollout_engine_dtype", "rollout_engine_device", "rollout_engine_threads",
            "rollout_engine_max_running_requests", "rollout_engine_max_total_tokens", "rollout_engine_host",
        ),
        "engines that the run starts, without --rollout-external-engine-addrs", _STARTS_ENGINES, refused=True,
    ),
    Effect(
        (
            "rollout_engine_max_restarts", "rollout_engine_restart_window", "service_max_restarts",
            "service_restart_window", "restart_point_interval",
        ),
        "restarts of lost services, without --no-use-fault-tolerance", _RESTARTS, refused=True,
    ),
    Effect(
        # Scripts of the original set the first for every run.
        ("rollout_engine", "rollout_num_gpus", "rollout_engine_max_restarts", "rollout_engine_restart_window"),
        "engines that the run starts, without --rollout-external-engine-addrs", _STARTS_ENGINES,
    ),
    Effect(("memory_recorder",), "--record-memory-history", _on("record_memory_history"), refused=True),
    Effect(
        ("profile_step_start", "profile_target"), "--use-pytorch-profiler", _on("use_pytorch_profiler"), refused=True
    ),
    Effect(("fsdp_sharding",), "--train-backend fsdp", _on("train_backend", "fsdp"), refused=True),
    Effect(
        ("activation_memory_budget",), "compiled layers, without --no-compile",
        lambda args: args["compile"] is not False, refused=True,
    ),
    Effect(
        ("compile",), "the model of Megatron, without --custom-model-provider-path",
        lambda args: not args["custom_model_provider_path"],
    ),
    Effect(
        ("ray_num_cpus",), "a Ray that the run starts, without --ray-address",
        lambda args: not args["ray_address"], refused=True,
    ),
    # Only named: Ray sets the variable for each job that is submitted, whose flags may be those of a run by itself.
    Effect(
        ("ray_num_cpus",), "a Ray that the run starts, without RAY_ADDRESS",
        lambda args: bool(args["ray_address"]) or not os.environ.get("RAY_ADDRESS"),
    ),
    Effect(
        ("tb_project_name", "tb_experiment_name"), "--use-tensorboard", _on("use_tensorboard")
    ),
    Effect(
        ("rollout_shuffle",), "--prompt-data", _any(_on("prompt_data"), _OWN_SOURCE)
    ),
    Effect(
        (
            "eval_input_key", "eval_label_key", "eval_tool_key", "eval_reward_key", "eval_temperature", "eval_top_p",
            "eval_top_k", "eval_max_response_len", "eval_max_prompt_len", "eval_max_context_len", "eval_min_new_tokens",
            "eval_function_path", "n_samples_per_eval_prompt", "custom_eval_rollout_log_function_path",
        ),
        "--eval-prompt-data", _on("eval_prompt_data"),
    ),
    Effect(
        ("loss_mask_type",), "--rollout-function-path slime.rollout.sft_rollout.generate_rollout", _OWN_ROLLOUT
    ),
    Effect(
        ("tis_clip", "tis_clip_low", "custom_tis_function_path"), "--use-tis or --get-mismatch-metrics", _CORRECTS
    ),
    Effect(("opsm_delta",), "--use-opsm", _any(_on("use_opsm"), _OWN_LOSS)),
    Effect(
        (
            "eps_clip", "eps_clip_high", "eps_clip_c", "entropy_coef", "normalize_advantages", "use_tis", "use_opsm",
            "use_kl_loss", "kl_loss_coef", "use_rollout_logprobs", "custom_pg_loss_reducer_function_path",
            "grpo_std_normalization", "grpo_std_scope", "rewards_normalization",
        ),
        "--loss-type policy_loss", lambda args: args["loss_type"] != "sft_loss",
    ),
    Effect(
        ("grpo_std_normalization", "grpo_std_scope"), "an --advantage-estimator that divides by the standard deviation",
        lambda args: find_estimator(args["advantage_estimator"]).scale or args["loss_type"] == "sft_loss",
    ),
    Effect(
        ("grpo_std_scope",), "centred rewards that are divided by their standard deviation",
        lambda args: args["grpo_std_normalization"] and args["rewards_normalization"],
    ),
    Effect(
        ("rewards_normalization",), "an --advantage-estimator that compares the samples of a prompt",
        lambda args: find_estimator(args["advantage_estimator"]).baseline or args["loss_type"] == "sft_loss",
    ),
    Effect(("kl_loss_type",), "--use-kl-loss or --kl-coef", _any(_on("use_kl_loss"), _on("kl_coef"), _OWN_LOSS)),
    Effect(("use_unbiased_kl",), "--use-kl-loss", _any(_on("use_kl_loss"), _OWN_LOSS)),
    Effect(
        ("ref_load",),
        "--use-kl-loss, --kl-coef, or with Megatron a --load that is still empty (the run starts from --load or "
        "--hf-checkpoint)",
        _any(_on("use_kl_loss"), _on("kl_coef"), _OWN_LOSS, _FROM_REFERENCE),
    ),
    Effect(
        ("lr_decay_iters",), "--lr-decay-style or --lr-warmup-fraction",
        lambda args: args["lr_decay_style"] != "constant" or args["lr_warmup_fraction"],
    ),
    Effect(("min_lr",), "another --lr-decay-style than constant", lambda args: args["lr_decay_style"] != "constant"),
    Effect(
        ("micro_batch_size",), "forward passes of a number of samples, without --use-dynamic-batch-size",
        lambda args: not args["use_dynamic_batch_size"],
    ),
    Effect(("no_save_optim",), "--save-interval N", _on("save_interval")),
)  # fmt: skip


def _of(*packages: str) -> set[str]:
    """Returns the settings that these packages alone have."""
    return {name for name, flag in declared().items() if {*flag.packages} <= {*packages}}


def _starting_with(*prefixes: str) -> set[str]:
    return {name for name in declared() if name.startswith(prefixes)}


_EVALUATION = _starting_with("eval_") | {
    "n_samples_per_eval_prompt", "skip_eval_before_train", "custom_eval_rollout_log_function_path",
}  # fmt: skip
_ENGINES = _starting_with(
    "rollout_engine", "rollout_num_", "rollout_health_", "rollout_external_", "rollout_weight_", "update_weight",
    "sglang_",
) | {"offload_rollout", "check_weight_update_equal", "update_timeout_seconds"}  # fmt: skip
_UPDATES = {field.name for field in fields(AlgorithmSettings)} | {
    "lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction", "lr_decay_iters", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "reset_optimizer_states", "skip_nonfinite_updates",
    "num_steps_per_rollout", "balance_data", "balance_by_flops", "use_dynamic_global_batch_size",
    "update_weights_interval", "train_timeout_seconds", "save_debug_train_data", "dynamic_sampling_filter_path",
    "over_sampling_batch_size", "partial_rollout", "mask_offpolicy_in_partial_rollout", "rollout_sample_filter_path",
    "rollout_all_samples_process_path", "custom_rollout_log_function_path", "rollout_prompt_wait_seconds",
    "overlong_mask", "overlong_buffer_len", "overlong_penalty", "rollout_shuffle", "buffer_filter_path",
}  # fmt: skip

# Warnings: a part is left out by one flag more on the command line of a whole run.
MODES = (
    Mode(
        "every run sends requests through the rollout service's own router", lambda args: True,
        frozenset({"use_slime_router"}),
    ),
    Mode(
        "--debug-rollout-only starts no trainer", _on("debug_rollout_only"),
        # --load also gives the position in the data, and --use-opd the teacher that scores samples.
        frozenset(
            _of("trainer", "megatron") - {"load", "use_opd"} | {
                "train_backend", "seed", "train_timeout_seconds", "save_timeout_seconds", "update_timeout_seconds",
                "update_weights_interval", "restart_point_interval", "train_env_vars", "true_on_policy_mode",
                "initial_megatron_checkpoint", "megatron_to_hf_mode",
            }
        ),
    ),
    Mode(
        "--debug-rollout-only starts no trainer", lambda args: args["debug_rollout_only"] and not args["colocate"],
        frozenset({"actor_num_nodes", "actor_num_gpus_per_node"}),
    ),
    Mode(
        "--load-debug-rollout-data generates nothing", _on("load_debug_rollout_data"),
        # The dry run counts tokens by these lengths.
        frozenset(
            (_of("rollout") | _of("buffer", "rollout") | _ENGINES | _EVALUATION)
            - {"rollout_max_response_len", "rollout_max_prompt_len", "rollout_max_context_len", "use_fault_tolerance"}
            - {name for name in _of("buffer") if name.startswith(("max_", "lease_", "buffer_durability"))}
            - {"prompt_data", "input_key", "label_key"}
            | {"rollout_timeout_seconds", "update_weights_interval"}
        ),
    ),
    Mode(
        "--debug-train-only starts no engine and evaluates nothing", _on("debug_train_only"),
        frozenset(_ENGINES | _EVALUATION),
    ),
    Mode("--num-rollout 0 trains nothing", lambda args: args["num_rollout"] == 0, frozenset(_UPDATES)),
)  # fmt: skip


def _left_out(config: RunConfig) -> Iterator[tuple[str, list[str]]]:
    """Yields (the part that is left out, the names of the settings that only it reads), each name once."""
    seen: set[str] = set()
    for mode in MODES:
        if mode.holds(config.flat):
            names = [name for name in config.explicit if name in mode.names - seen and _is_set(config, name)]
            seen.update(names)
            if names:
                yield mode.reason, names


def refuse_without_effect(config: RunConfig) -> None:
    """Raises InvalidSetting for a flag that nothing in this run reads.

    A value of a SLIME_* variable or a preset is not an error, since it is meant for other runs, too.
    """
    left_out = {name for _, names in _left_out(config) for name in names}
    for effect in EFFECTS:
        for name in effect.without(config) if effect.refused else ():
            if name not in config.origins and name not in left_out:
                typed = _spelled(config, name)
                raise InvalidSetting.requires(typed, effect.needs, "without it nothing reads this setting")


def advice(config: RunConfig, *, asynchronous: bool = False) -> Iterator[str]:
    """Yields a warning for each setting without effect, and for settings that are probably a mistake."""
    left_out: set[str] = set()
    for reason, names in _left_out(config):
        left_out.update(names)
        has = "has" if len(names) == 1 else "have"
        yield f"{', '.join(_spelled(config, name) for name in names)} {has} no effect: {reason}"
    for effect in EFFECTS:
        for name in effect.without(config):
            if name not in left_out and (not effect.refused or name in config.origins):
                yield f"{_spelled(config, name)} has no effect: it requires {effect.needs}"
    yield from _one_file_for_all(config)
    if not config.launcher.debug_rollout_only:
        on_time = config.launcher.fully_async and staleness_bound(config.flat) == 0
        yield from trainer.advice(config.trainer, asynchronous=asynchronous and not on_time)
        yield from other_defaults(config.trainer, config.explicit)
        yield from _rounding_in_training()
        yield from _emulated_bfloat16(config)
    if not config.launcher.debug_train_only:
        yield from _lengths(config)


def _rounding_in_training() -> Iterator[str]:
    """Yields what a variable of the original system does not do, which its scripts for INT4 set."""
    if os.environ.get(FAKE_INT4) == "1":
        yield (
            f"{FAKE_INT4}=1 has no effect: training does not round weights to INT4, only weight updates are rounded; "
            "--use-tis weights the loss by the ratio of the two models' probabilities"
        )


def _emulated_bfloat16(config: RunConfig) -> Iterator[str]:
    """Yields what --bf16 costs, if the trainer computes on the CPU of this machine."""
    settings = config.launcher
    elsewhere = settings.ray_address or os.environ.get("RAY_ADDRESS") or settings.dry_run_gpus
    if config.trainer.bf16 and not elsewhere and not probes.gpus() and not probes.multiplies_bfloat16():
        yield trainer.EMULATED_BFLOAT16


def _one_file_for_all(config: RunConfig) -> Iterator[str]:
    """Yields what a path without {rollout_id} means, where the run has several iterations."""
    if config.launcher.num_rollout in (0, 1):
        return
    for name, meaning in (
        ("save_debug_rollout_data", "each iteration replaces the file of the one before"),
        ("save_debug_train_data", "each iteration replaces the file of the one before"),
        ("load_debug_rollout_data", "every iteration trains on the samples of this file"),
    ):
        template = config.flat[name]
        if template and "{rollout_id" not in template:
            if name == "save_debug_rollout_data" and config.evaluates:
                meaning += f", and each evaluation {path_of(template, 0, evaluation=True)}"
            yield f"{as_typed(name, template)} has no {{rollout_id}}: {meaning}"


def _lengths(config: RunConfig) -> Iterator[str]:
    """Yields a warning for each response length that exceeds the context."""
    # This imports gRPC, which `--help` should not wait for.
    from slime.rollout.prompts.tokenizer import context_length

    rollout = config.rollout
    if all(args.keys() & {"context_length", "json_model_override_args"} for args in trained_server_args(rollout)):
        return  # the engines do not use the context length of config.json
    try:
        model = context_length(rollout.hf_checkpoint)
    except (ValueError, AttributeError):
        return  # the checks that need the whole config report the fault
    for phase in ("rollout", "eval"):
        name = f"{phase}_max_response_len"
        length, limit, allows = config.explicit.get(name), model, f"--hf-checkpoint {rollout.hf_checkpoint}"
        for limit_name in (f"{phase}_max_context_len", "rollout_max_context_len"):
            if getattr(rollout, limit_name):
                limit, allows = getattr(rollout, limit_name), flag_name(limit_name)
                break
        if isinstance(length, int) and limit is not None and length > limit:
            yield (
                f"{flag_name(name)} {length} exceeds the {limit} tokens that {allows} allows for prompt and response "
                "together: responses end there"
            )
