"""Rejects conflicting or unsupported trainer settings, and warns about doubtful ones."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.trainer.algorithms.estimators import constant_ratio, estimators_that, find_estimator
from slime.trainer.settings.adapters import other_base
from slime.trainer.settings.algorithm import TIS_MODES, TIS_MODES_OF_FUNCTIONS
from slime.types.errors import InvalidSetting, counted
from slime.types.setting_values import flag_name
from slime.types.settings import spelled

if TYPE_CHECKING:
    from slime.trainer.settings.trainer import TrainerSettings

MEGATRON_ONLY = (
    "model_name", "async_save", "only_train_params_name_list", "freeze_params_name_list", "enable_mtp_training",
    "custom_model_provider_path", "custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
)  # fmt: skip


# Value of --lora-target-modules.
ALL_LINEAR = "all-linear"
CRITIC_ONLY = ("critic_load", "critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps", "value_clip", "lambd")
EMULATED_BFLOAT16 = (
    "--bf16 is slow on this processor: torch has no fast matrix products in bfloat16 for it, and those it has take "
    "many times longer than in float32 (docs/benchmarks/cpu.md); leave out --bf16"
)
# Terms and corrections of the policy loss.
POLICY_LOSS_ONLY = (
    "kl_loss_coef", "use_tis", "use_opsm", "custom_tis_function_path", "custom_pg_loss_reducer_function_path",
)  # fmt: skip


def refuse_contradictions(settings: TrainerSettings) -> None:
    """Raises InvalidSetting, naming both settings, or an estimator that does not exist."""
    s = settings
    find_estimator(s.advantage_estimator)
    if s.train_backend != "megatron":
        for field in MEGATRON_ONLY:
            if getattr(s, field):
                _requires(s, field, "--train-backend megatron")
    if s.only_train_params_name_list and s.freeze_params_name_list:
        _conflict(s, "only_train_params_name_list", "freeze_params_name_list", "either one decides for every parameter")
    for field in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in getattr(s, field) or ():
            _check_pattern(flag_name(field), pattern)
    _check_losses(s)
    _check_estimator(s)
    _check_old_policies(s)
    if s.use_dynamic_batch_size and s.max_tokens_per_gpu is None:
        _requires(s, "use_dynamic_batch_size", "--max-tokens-per-gpu N")
    for name in ("max_tokens_per_gpu", "log_probs_max_tokens_per_gpu", "balance_by_flops"):
        if getattr(s, name) and not s.use_dynamic_batch_size:
            _requires(s, name, "--use-dynamic-batch-size")
    if s.lr_warmup_fraction is not None and s.lr_warmup_iters:
        _conflict(s, "lr_warmup_fraction", "lr_warmup_iters", "both set the length of the warm-up")
    if s.lr_warmup_fraction == 1 and s.lr_decay_style != "constant":
        _conflict(s, "lr_warmup_fraction", "lr_decay_style", "the decay must end after the warm-up")
    if s.lr_decay_iters is not None and s.lr_decay_iters <= s.lr_warmup_iters:
        _conflict(s, "lr_decay_iters", "lr_warmup_iters", "the decay must end after the warm-up")
    if s.min_lr > s.lr:
        _conflict(s, "min_lr", "lr", "the last learning rate must be at most the first")
    _check_transport(s)
    _check_batch_sizes(s)
    _check_lora(s)


def require_schedule(settings: TrainerSettings) -> None:
    """Raises InvalidSetting for a trainer whose learning rates depend on a number of updates that it was not given."""
    s = settings
    if s.depends_on_length and s.lr_decay_iters is None:
        name = "lr_warmup_fraction" if s.lr_warmup_fraction else "lr_decay_style"
        _requires(s, name, "--lr-decay-iters N", "a trainer alone does not know how long the run is")


def advice(settings: TrainerSettings, *, asynchronous: bool = False) -> Iterator[str]:
    """Yields a sentence for each setting that is valid and probably not what was meant.

    asynchronous: rollouts are generated with older weights than the trainer's.
    """
    s = settings
    if s.true_on_policy_mode and s.train_backend == "megatron":
        yield (
            "--true-on-policy-mode with --train-backend megatron only keeps to one update per iteration: its log-probs "
            "differ from the engine's by rounding; --train-backend fsdp computes them with the engine's kernels"
        )
    if s.lora_rank and s.load and (sentence := other_base(s.load, s.hf_checkpoint)):
        yield sentence
    if s.loss_type != "policy_loss":
        return
    if s.use_kl_loss and s.kl_loss_coef and s.kl_loss_type == "k1" and not s.use_unbiased_kl:
        yield (
            "--kl-loss-type k1 does not hold the policy near the reference: on average its gradient is 0, not that of "
            "the KL divergence; use --kl-loss-type k2, or --use-unbiased-kl"
        )
    if find_estimator(s.advantage_estimator).loss is constant_ratio and s.eps_clip < 1:
        yield (
            f"--advantage-estimator {s.advantage_estimator} with --eps-clip {s.eps_clip:g} also raises ratios below "
            f"{1 - s.eps_clip:g}, and its ratio needs no lower bound: use --eps-clip 1, and --eps-clip-high for the "
            "upper one"
        )
    corrected = s.use_tis or s.use_rollout_logprobs or s.keep_old_actor
    if asynchronous and not corrected:
        yield (
            "train-async trains on rollouts of older weights, and nothing corrects for them: add --use-tis, "
            "--use-rollout-logprobs or --keep-old-actor (docs/training-loops.md compares them)"
        )
    moves = s.updates_per_iteration > 1 or s.use_rollout_logprobs or s.keep_old_actor
    if s.use_opsm and not moves:
        yield (
            "--use-opsm drops nothing: with one update per iteration the old policy is the policy itself; use "
            "--use-rollout-logprobs, --keep-old-actor or --num-steps-per-rollout above 1"
        )


def _check_estimator(s: TrainerSettings) -> None:
    estimator = find_estimator(s.advantage_estimator)
    if estimator.whiten and not s.normalize_advantages:
        _requires(s, "advantage_estimator", "--normalize-advantages", "its advantages have no other baseline")
    if s.kl_coef and s.loss_type == "sft_loss":
        _conflict(s, "kl_coef", "loss_type", "it has no rewards, from which the KL is subtracted")
    if s.kl_coef and not estimator.subtracts_kl:
        _conflict(s, "kl_coef", "advantage_estimator", _used_by(estimators_that(lambda row: row.subtracts_kl)))
    if s.gamma != 1 and not estimator.discounts:
        _conflict(s, "gamma", "advantage_estimator", _used_by(estimators_that(lambda row: row.discounts)))
    _check_critic(s)
    _check_distillation(s)
    if s.eps_clip_c is not None and estimator.loss is constant_ratio:
        _conflict(s, "eps_clip_c", "advantage_estimator", "its loss has no dual clip")


def _check_critic(s: TrainerSettings) -> None:
    if s.use_critic:
        if s.critic_lr is not None and s.min_lr > s.critic_lr:
            _conflict(s, "min_lr", "critic_lr", "the last learning rate must be at most the first")
        if s.lr_decay_iters is not None and s.lr_decay_iters + s.critic_only_updates <= s.critic_lr_warmup_iters:
            _conflict(s, "lr_decay_iters", "critic_lr_warmup_iters", "the decay must end after the warm-up")
        return
    for name in CRITIC_ONLY:
        if getattr(s, name) != getattr(type(s), name):
            critics = estimators_that(lambda row: row.critic)
            _requires(s, name, f"--advantage-estimator {critics}", "no other estimator has a critic")


def _check_distillation(s: TrainerSettings) -> None:
    if not s.use_opd:
        for name in ("opd_type", "opd_teacher_load"):
            if getattr(s, name) is not None:
                _requires(s, name, "--use-opd")
        if s.opd_kl_coef != type(s).opd_kl_coef:
            _requires(s, "opd_kl_coef", "--use-opd")
        return
    if s.opd_type is None:
        raise InvalidSetting.requires("--use-opd", "--opd-type sglang or --opd-type trainer")
    if s.loss_type == "sft_loss":
        _conflict(s, "use_opd", "loss_type", "it has no advantages, where the teacher counts")
    if not s.compute_advantages_and_returns:
        _conflict(s, "use_opd", "compute_advantages_and_returns", "the teacher counts in the advantages")
    if s.loads_teacher and s.opd_teacher_load is None:
        _requires(s, "opd_type", "--opd-teacher-load DIR")
    if not s.loads_teacher and s.opd_teacher_load is not None:
        _requires(s, "opd_teacher_load", "--opd-type trainer", "an engine loads its model itself")


def _used_by(estimators: str) -> str:
    return f"only {estimators} use it" if "," in estimators else f"only {estimators} uses it"


def _check_losses(s: TrainerSettings) -> None:
    if s.loss_type == "policy_loss" and not s.compute_advantages_and_returns:
        _conflict(s, "loss_type", "compute_advantages_and_returns", "the policy loss is made of advantages")
    if s.custom_loss_function_path is not None and s.loss_type != "custom_loss":
        _requires(s, "custom_loss_function_path", "--loss-type custom_loss")
    if s.loss_type == "custom_loss" and s.custom_loss_function_path is None:
        _requires(s, "loss_type", "--custom-loss-function-path PATH")
    for name in POLICY_LOSS_ONLY:
        if s.loss_type == "custom_loss" and getattr(s, name):
            _requires(s, name, "--loss-type policy_loss", "a loss function of yours is the whole loss")
    if s.loss_divisor is not None:
        for name in ("calculate_per_token_loss", "custom_pg_loss_reducer_function_path"):
            if getattr(s, name):
                _conflict(s, "loss_divisor", name, "both say what a sum over tokens is divided by")
    if s.kl_coef and s.kl_loss_coef:
        _conflict(s, "kl_coef", "kl_loss_coef", "the KL counts in the reward or in the loss, not in both")
    if s.kl_loss_coef and not s.use_kl_loss:
        _requires(s, "kl_loss_coef", "--use-kl-loss")
    if s.ref_update_interval and not s.needs_reference:
        _requires(s, "ref_update_interval", "--use-kl-loss or --kl-coef X", "nothing else has a reference model")
    if s.use_tis and s.use_rollout_logprobs:
        _conflict(s, "use_tis", "use_rollout_logprobs", "both correct for the engine's log-probs")
    if s.use_routing_replay:
        reason = "rows are replayed as they were scored, with the weights of the policy"
        for name in ("use_rollout_routing_replay", "keep_old_actor", "log_probs_max_tokens_per_gpu"):
            if getattr(s, name):
                _conflict(s, "use_routing_replay", name, reason)
        without = {
            "loss_type": s.loss_type == "sft_loss",
            "use_rollout_logprobs": s.use_rollout_logprobs,
            "compute_advantages_and_returns": not s.compute_advantages_and_returns,
        }
        for name, applies in without.items():
            if applies:
                _conflict(s, "use_routing_replay", name, "no pass computes old log-probs")
    if s.tis_clip_low > s.tis_clip:
        _conflict(s, "tis_clip_low", "tis_clip", "the lower bound must be at most the upper one")
    if s.tis_mode != type(s).tis_mode:
        if not s.use_tis and not s.get_mismatch_metrics:
            _requires(s, "tis_mode", "--use-tis or --get-mismatch-metrics")
        of_function = s.tis_mode in TIS_MODES_OF_FUNCTIONS
        if s.custom_tis_function_path and not of_function:
            _conflict(s, "tis_mode", "custom_tis_function_path", "both define the weight")
        if of_function and not s.custom_tis_function_path:
            reason = "--use-tis by itself has --tis-mode " + ", ".join(TIS_MODES)
            _requires(s, "tis_mode", "--custom-tis-function-path", reason)


def refuse_nuclei_without_gradient(settings: TrainerSettings) -> None:
    """Raises InvalidSetting for top-p or top-k sampling of which a trainer would learn nothing, or something else."""
    s = settings
    if not s.samples_from_nuclei:
        return
    name = "rollout_top_p" if s.rollout_top_p < 1 else "rollout_top_k"
    if s.rollout_top_k == 1:
        raise InvalidSetting.must_be(
            "--rollout-top-k", "-1 or more than 1", got=1,
            reason="a nucleus of one token has probability 1, and no gradient",
        )  # fmt: skip
    if s.loss_type == "sft_loss":
        _conflict(s, name, "loss_type", "nothing was sampled that it trains on")
    if s.use_opd and not s.loads_teacher:
        _conflict(s, name, "opd_type", "the teacher's log-probs are over the whole vocabulary")


def compares_rewards(settings: TrainerSettings) -> bool:
    """Tells whether only differences between a group's rewards can be learned from; a plug-in may do otherwise."""
    plug_ins = (
        settings.custom_reward_post_process_path, settings.custom_advantage_function_path,
        settings.custom_convert_samples_to_train_data_path, settings.rollout_data_postprocess_path,
    )  # fmt: skip
    centred = find_estimator(settings.advantage_estimator).baseline is not None and settings.rewards_normalization
    return settings.loss_type == "policy_loss" and centred and not settings.use_opd and not any(plug_ins)


def refuse_groups_of_one(settings: TrainerSettings) -> None:
    """Raises InvalidSetting where every advantage would be 0: a single reward minus the mean of its group is 0.

    For the settings of a run that trains: this class of settings does not know whether its run does.
    """
    if settings.n_samples_per_prompt == 1 and compares_rewards(settings):
        raise InvalidSetting.conflict(
            "--n-samples-per-prompt 1",
            spelled(settings, "advantage_estimator"),
            "every advantage would be 0, because it compares the samples of a prompt with each other; use "
            "--n-samples-per-prompt 2 or more, or another estimator",
        )


def _check_old_policies(s: TrainerSettings) -> None:
    if s.loss_type != "policy_loss":
        for name in ("keep_old_actor", "get_mismatch_metrics", "use_rollout_entropy"):
            if getattr(s, name):
                _requires(s, name, "--loss-type policy_loss", "no other loss has an old policy")
    if s.keep_old_actor and s.use_rollout_logprobs:
        _conflict(s, "keep_old_actor", "use_rollout_logprobs", "both define the old policy")
    if s.custom_convert_samples_to_train_data_path and s.custom_reward_post_process_path:
        _conflict(
            s,
            "custom_convert_samples_to_train_data_path",
            "custom_reward_post_process_path",
            "converted data already has its training rewards",
        )


def _check_transport(s: TrainerSettings) -> None:
    if s.update_weight_transport == "disk" and s.update_weight_disk_dir is None:
        _requires(s, "update_weight_transport", "--update-weight-disk-dir DIR")
    if s.update_weight_transport == "ipc" and not s.colocate:
        _requires(s, "update_weight_transport", "--colocate", "an engine reads the memory of its own GPUs only")
    if s.update_weight_transport == "ipc" and s.rollout_external_engine_addrs:
        _conflict(
            s, "update_weight_transport", "rollout_external_engine_addrs",
            "external engines cannot read the trainer's GPU memory",
        )  # fmt: skip
    if s.update_weight_transport == "nccl" and s.colocate:
        _conflict(
            s, "update_weight_transport", "colocate", "NCCL connects two processes only if each has GPUs of its own"
        )
    if s.update_weight_mode == "delta" and s.update_weight_transport == "ipc":
        _conflict(
            s, "update_weight_mode", "update_weight_transport",
            "over CUDA IPC engines read whole tensors in place, so deltas would save nothing",
        )  # fmt: skip
    if s.update_weight_local_checkpoint_dir is not None:
        for field, value in (("update_weight_mode", "delta"), ("update_weight_transport", "disk")):
            if getattr(s, field) != value:
                _requires(s, "update_weight_local_checkpoint_dir", f"{flag_name(field)} {value}")
        places = s.update_weight_local_checkpoint_dir, s.update_weight_disk_dir or ""
        if len({os.path.realpath(place) for place in places}) == 1:
            _conflict(
                s, "update_weight_local_checkpoint_dir", "update_weight_disk_dir",
                "they must be two directories: each removes the versions in its own",
            )  # fmt: skip


def _check_lora(s: TrainerSettings) -> None:
    if not s.lora_rank:
        for name, default in (("lora_alpha", type(s).lora_alpha), ("lora_target_modules", [ALL_LINEAR])):
            if getattr(s, name) != default:
                _requires(s, name, "--lora-rank R")
        return
    if s.train_backend != "fsdp":
        _requires(s, "lora_rank", "--train-backend fsdp", f"{s.train_backend} has no LoRA yet")
    if s.true_on_policy_mode:
        reason = (
            "engines compute with merged weights, the trainer with weights and adapters apart, which rounds otherwise"
        )
        _conflict(s, "lora_rank", "true_on_policy_mode", reason)
    if s.ref_update_interval and not s.reference_is_base:
        _conflict(s, "ref_update_interval", "ref_load", "with --lora-rank only the base model can become the policy")


def _check_batch_sizes(s: TrainerSettings) -> None:
    if s.use_dynamic_global_batch_size:
        reason = "it makes one update per iteration, of all its trajectories"
        if s.global_batch_size is not None:
            _conflict(s, "use_dynamic_global_batch_size", "global_batch_size", reason)
        if (s.num_steps_per_rollout or 1) > 1:
            _conflict(s, "use_dynamic_global_batch_size", "num_steps_per_rollout", reason)
    if s.rollout_batch_size is None:
        return
    count = s.rollout_batch_size * s.n_samples_per_prompt
    trajectories = f"{counted(count, 'trajectory')} (--rollout-batch-size x --n-samples-per-prompt)"
    updates = s.num_steps_per_rollout
    if updates and updates > count:
        raise InvalidSetting.must_be(
            flag_name("num_steps_per_rollout"), f"at most {count}", got=updates, reason=f"there are {trajectories}"
        )
    if s.global_batch_size and updates and s.global_batch_size != count // updates:
        reason = f"{trajectories} in {counted(updates, 'update')} make {count // updates} each"
        _conflict(s, "global_batch_size", "num_steps_per_rollout", reason)
    if s.global_batch_size and s.global_batch_size > count:
        raise InvalidSetting.must_be(
            flag_name("global_batch_size"), f"at most {count}", got=s.global_batch_size,
            reason=f"an iteration has {trajectories}",
        )  # fmt: skip


def _conflict(settings: TrainerSettings, first: str, second: str, reason: str) -> None:
    raise InvalidSetting.conflict(spelled(settings, first), spelled(settings, second), reason)


def _requires(settings: TrainerSettings, name: str, needed: str, reason: str = "") -> None:
    raise InvalidSetting.requires(spelled(settings, name), needed, reason)


def _check_pattern(flag: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidSetting.must_be(flag, "a regular expression", got=pattern, reason=str(error)) from None
