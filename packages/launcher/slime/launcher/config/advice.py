"""Finds settings of a run that have no effect, or are valid and probably not what was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.launcher.config.catalogue import as_typed, declared
from slime.launcher.config.check_loop import staleness_bound
from slime.launcher.config.derived import other_defaults
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE, DEFAULT_ROLLOUT_FUNCTION
from slime.trainer.algorithms.estimators import find_estimator
from slime.trainer.settings import checks as trainer
from slime.types.errors import InvalidSetting
from slime.types.setting_values import flag_name

if TYPE_CHECKING:
    from slime.launcher.config.run_config import RunConfig

Condition = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Effect:
    """The condition on all settings, by name, under which something reads the settings in `names`.

    needs: the flags that meet it. refused: otherwise an error where one of them was set; a warning for settings that
    scripts of the original set for every run.
    """

    names: tuple[str, ...]
    needs: str
    holds: Condition
    refused: bool = False

    def without(self, config: RunConfig) -> Iterator[str]:
        """Yields the settings, as they are typed, that were set and that nothing reads."""
        for name in self.names:
            value = config.explicit.get(name)
            # A default that is a number or a switch says what is so without the flag, too.
            unset = value is None or (not isinstance(value, str) and value == declared()[name].default)
            if not unset and not self.holds(config.flat):
                yield as_typed(name, " ".join(map(str, value)) if isinstance(value, list) else value)


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
    Effect(("update_weight_disk_keep_files",), "--update-weight-transport disk", _DISK, refused=True),
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
            "grpo_std_normalization", "rewards_normalization",
        ),
        "--loss-type policy_loss", lambda args: args["loss_type"] != "sft_loss",
    ),
    Effect(
        ("grpo_std_normalization",), "an --advantage-estimator that divides by the standard deviation",
        lambda args: find_estimator(args["advantage_estimator"]).scale or args["loss_type"] == "sft_loss",
    ),
    Effect(
        ("rewards_normalization",), "an --advantage-estimator that compares the samples of a prompt",
        lambda args: find_estimator(args["advantage_estimator"]).baseline or args["loss_type"] == "sft_loss",
    ),
    Effect(("kl_loss_type",), "--use-kl-loss or --kl-coef", _any(_on("use_kl_loss"), _on("kl_coef"), _OWN_LOSS)),
    Effect(("use_unbiased_kl",), "--use-kl-loss", _any(_on("use_kl_loss"), _OWN_LOSS)),
    Effect(("ref_load",), "--use-kl-loss or --kl-coef", _any(_on("use_kl_loss"), _on("kl_coef"), _OWN_LOSS)),
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


def refuse_without_effect(config: RunConfig) -> None:
    """Raises InvalidSetting for a setting that nothing in this run reads."""
    for effect in EFFECTS:
        for typed in effect.without(config) if effect.refused else ():
            raise InvalidSetting.requires(typed, effect.needs, "without it nothing reads this setting")


def advice(config: RunConfig, *, asynchronous: bool = False) -> Iterator[str]:
    """Yields a sentence for each doubt."""
    for effect in EFFECTS:
        for typed in effect.without(config) if not effect.refused else ():
            yield f"{typed} has no effect: it requires {effect.needs}"
    if not config.launcher.debug_rollout_only:
        on_time = config.launcher.fully_async and staleness_bound(config.flat) == 0
        yield from trainer.advice(config.trainer, asynchronous=asynchronous and not on_time)
        yield from other_defaults(config.trainer, config.explicit)
    if not config.launcher.debug_train_only:
        yield from _lengths(config)


def _lengths(config: RunConfig) -> Iterator[str]:
    """Yields limits of a response that the context is too short for."""
    # It imports gRPC, which --help does without.
    from slime.rollout.generate.prompts import context_length

    rollout = config.rollout
    if rollout.sglang_args.keys() & {"context_length", "json_model_override_args"}:
        return  # the engines have another context than config.json says
    try:
        model = context_length(rollout.hf_checkpoint)
    except (ValueError, AttributeError):
        return  # whoever needs the whole config says what is wrong with it
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
