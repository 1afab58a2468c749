"""The settings of a trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.trainer.algorithms.estimators import ESTIMATORS, estimators_that, find_estimator
from slime.trainer.settings.checks import refuse_contradictions, refuse_unavailable
from slime.trainer.settings.debug import DebugSettings
from slime.types.settings import like, setting
from slime.types.shared_settings import BatchSettings, GroupSettings, ModeSettings, PolicySettings, TrainingSettings

# Kinds of weights that correct for the mismatch of engine and trainer; see `algorithms.importance`.
TIS_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Where the log-probs of a teacher come from.
OPD_TYPES = ("sglang", "trainer", "megatron")


@dataclasses.dataclass(kw_only=True)
class TrainerSettings(PolicySettings, GroupSettings, TrainingSettings, ModeSettings, DebugSettings):
    """Trainer."""

    # Model, checkpoints
    load: str | None = setting(
        None, "Checkpoint, or directory of checkpoints, to resume from: weights, optimizer and iteration", metavar="DIR"
    )
    ref_load: str | None = setting(
        None,
        "Hugging Face directory, or torch_dist checkpoint (megatron), of the reference model (default: "
        "--hf-checkpoint)",
        metavar="DIR",
    )
    model_name: str | None = setting(
        None, "Model family to assume in place of the model_type in config.json (megatron)", metavar="NAME"
    )
    bf16: bool | None = setting(
        None, "Compute in bfloat16; weights and optimizer stay float32 (default: on for GPUs, off for a CPU)"
    )
    compile: bool | None = setting(
        None,
        "Compile the model's layers and the log-probs with torch.compile, and replay rows of recurring shapes "
        "as CUDA graphs if the trainer keeps its memory (default: on for GPUs, off for a CPU; megatron: dense models "
        "without Transformer Engine, tensor or context parallelism, no graphs)",
    )
    fsdp_sharding: str = setting(
        "auto",
        "State that the ranks of the fsdp backend share out: optimizer (all weights and gradients on each rank, one "
        "exchange per update), parameters (weights and gradients too, one exchange per layer), or auto: optimizer "
        "where that takes at most half of a GPU in bfloat16 (a quarter beside a critic)",
        choices=("auto", "optimizer", "parameters"),
    )
    activation_memory_budget: float = setting(
        1.0,
        "Share of its activations that a compiled layer keeps for the backward pass; it recomputes the rest, the "
        "cheapest first. Of Qwen3-0.6B, 0.8 saves 2.2 of 13.2 GiB at 0.5 % of the speed, 0.5 saves 4.8 GiB at 8 %",
        above=0,
        maximum=1,
    )
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass")
    recompute_loss_function: bool = setting(
        False, "Recompute the float32 logits in the backward pass in place of keeping them"
    )
    no_save_optim: bool = setting(False, "Leave the optimizer out of checkpoints")
    async_save: bool = setting(False, "Continue training while a checkpoint is written (megatron)")
    only_train_params_name_list: list[str] | None = setting(
        None, "Regular expressions searched in Megatron's parameter names: train only these (megatron)", metavar="RE"
    )
    freeze_params_name_list: list[str] | None = setting(
        None, "Regular expressions searched in Megatron's parameter names: do not train these (megatron)", metavar="RE"
    )
    enable_mtp_training: bool = setting(False, "Train the multi-token-prediction layers too (megatron)")
    custom_model_provider_path: str | None = setting(
        None, "Function that makes the model, in place of the default (megatron)", metavar="PATH"
    )
    custom_megatron_init_path: str | None = setting(
        None, "Function called once Megatron's process groups exist (megatron)", metavar="PATH"
    )
    custom_megatron_before_log_prob_hook_path: str | None = setting(
        None, "Function called before each pass that only computes log-probs (megatron)", metavar="PATH"
    )
    custom_megatron_before_train_step_hook_path: str | None = setting(
        None, "Function called before each optimizer update (megatron)", metavar="PATH"
    )

    # Optimizer
    lr: float = setting(1e-6, "Peak learning rate", above=0)
    min_lr: float = setting(0.0, "Learning rate at the end of the decay", minimum=0)
    lr_decay_style: str = setting(
        "constant", "Shape of the learning rate's decay", choices=("constant", "linear", "cosine")
    )
    lr_warmup_iters: int = setting(0, "Optimizer updates of linear warm-up", minimum=0)
    lr_warmup_fraction: float | None = setting(
        None, "Share of --lr-decay-iters that is warm-up, in place of --lr-warmup-iters", minimum=0, maximum=1
    )
    lr_decay_iters: int | None = setting(
        None,
        "Optimizer updates until the learning rate is --min-lr, warm-up included (default: those of the run)",
        minimum=1,
    )
    weight_decay: float = setting(0.01, "Weight decay of AdamW, for matrices only; vectors are not decayed", minimum=0)
    adam_beta1: float = setting(0.9, "Decay rate of AdamW's first moment", minimum=0, maximum=1)
    adam_beta2: float = setting(0.999, "Decay rate of AdamW's second moment", minimum=0, maximum=1)
    adam_eps: float = setting(1e-8, "Epsilon of AdamW's denominator", above=0)
    reset_optimizer_states: bool = setting(
        False, "Reset AdamW's moments and step count before the updates of each iteration"
    )
    skip_nonfinite_updates: bool = setting(
        False,
        "Skip an update whose gradient is infinite or not a number, log its cause and continue; without it "
        "the run ends",
    )
    clip_grad: float = setting(1.0, "Largest gradient norm; 0 turns clipping off", minimum=0)

    # Critic
    critic_load: str | None = setting(
        None,
        "Model, or critic/ of a checkpoint, that the critic starts from (default: --hf-checkpoint); a checkpoint of "
        f"--load that has a critic wins over it ({estimators_that(lambda row: row.critic)})",
        metavar="DIR",
    )
    critic_lr: float | None = setting(None, "Peak learning rate of the critic (default: --lr)", above=0)
    critic_lr_warmup_iters: int = setting(0, "Updates of the critic's linear warm-up", minimum=0)
    num_critic_only_steps: int = setting(
        0, "Iterations at the start of a run in which the critic trains and the policy does not", minimum=0
    )
    value_clip: float = setting(
        0.2, "Change of a value in one iteration beyond which the critic's loss is clipped", minimum=0
    )

    # Loss
    loss_type: str = setting("policy_loss", "Loss to minimise", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = setting(
        None, "Function that computes the loss of a packed row, for --loss-type custom_loss", metavar="PATH"
    )
    advantage_estimator: str = setting(
        "grpo",
        "Advantage estimator (the algorithm). " + "; ".join(f"{name}: {row.help}" for name, row in ESTIMATORS.items()),
        choices=tuple(ESTIMATORS),
    )
    compute_advantages_and_returns: bool = setting(
        True,
        "Compute advantages from the rewards",
        off_flag="disable-compute-advantages-and-returns",
        off_help="Compute no advantages, for --loss-type sft_loss",
    )
    rewards_normalization: bool = setting(
        True,
        "Subtract the mean of its group from each reward",
        off_flag="disable-rewards-normalization",
        off_help="Keep rewards as they are; do not subtract the mean of the group",
    )
    grpo_std_normalization: bool = setting(
        True,
        "Divide advantages by the standard deviation of their group",
        off_flag="disable-grpo-std-normalization",
        off_help="Subtract the mean of the group and do not divide by its standard deviation (Dr. GRPO)",
    )
    normalize_advantages: bool = setting(False, "Whiten advantages over all tokens of an iteration")
    gamma: float = setting(1.0, f"Discount factor ({estimators_that(lambda row: row.discounts)})", minimum=0, maximum=1)
    lambd: float = setting(1.0, f"Lambda of GAE ({estimators_that(lambda row: row.critic)})", minimum=0, maximum=1)
    eps_clip: float = setting(0.2, "Lower clip width of the ratio", minimum=0)
    eps_clip_high: float | None = setting(None, "Upper clip width of the ratio (default: --eps-clip)", minimum=0)
    eps_clip_c: float | None = setting(None, "Dual-clip constant (default: no dual clip)", above=1)
    use_kl_loss: bool = setting(False, "Load a reference model and report the KL to it; see --kl-loss-coef")
    kl_loss_coef: float = setting(0.0, "Weight of the KL term in the loss", minimum=0)
    kl_loss_type: str = setting(
        "k1",
        "KL estimator; as a loss, k2 has the gradient of the KL divergence, and k1 has it only with --use-unbiased-kl",
        choices=("k1", "k2", "k3", "low_var_kl"),
    )
    use_unbiased_kl: bool = setting(False, "Multiply the KL estimate by the importance ratio")
    kl_coef: float = setting(
        0.0,
        f"Weight of the KL penalty inside the reward ({estimators_that(lambda row: row.subtracts_kl)})",
        minimum=0,
    )
    use_opd: bool = setting(
        False,
        "On-policy distillation: subtract --opd-kl-coef times (log-prob of the policy - log-prob of the teacher) from "
        "the advantage of each token",
    )
    opd_type: str | None = setting(
        None,
        "Source of the teacher's log-probs for --use-opd: sglang, an engine that a reward function asks "
        "(slime.rollout.on_policy_distillation.reward_func); trainer, or megatron: the model of --opd-teacher-load",
        choices=OPD_TYPES,
    )
    opd_kl_coef: float = setting(1.0, "Weight of the teacher in the advantages of --use-opd", minimum=0)
    opd_teacher_load: str | None = setting(
        None,
        "Hugging Face directory of the teacher, with the policy's vocabulary; megatron also takes a torch_dist "
        "checkpoint, and requires the policy's architecture",
        metavar="DIR",
    )
    use_rollout_entropy: bool = setting(
        False,
        "Compute the policy's entropy before the updates of an iteration: metric rollout/entropy, and an input "
        "of plug-ins",
    )
    ref_update_interval: int | None = setting(
        None, "Make the policy the reference model after every N-th iteration (default: never)", minimum=1
    )
    keep_old_actor: bool = setting(
        False, "Compute old log-probs with the weights that made each token, copies of which stay in host memory"
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus")
    calculate_per_token_loss: bool = setting(False, "Average the loss over tokens, not over trajectories")
    loss_divisor: float | None = setting(
        None,
        "Divide the sum over a trajectory's tokens by this number in place of their count, so that tokens of long "
        "responses weigh no less (Dr. GRPO: the value of --rollout-max-response-len)",
        above=0,
    )
    use_rollout_logprobs: bool = setting(False, "Use the engine's log-probs as those of the old policy")
    use_tis: bool = setting(
        False, "Weight the policy loss by the ratio of the trainer's probabilities to the engine's; see --tis-mode"
    )
    tis_mode: str = setting(
        "token_truncate",
        "Weight of --use-tis: the ratio of each token, or the product over the sample; truncated to "
        "--tis-clip-low and --tis-clip, or 0 outside of them (token_mask is IcePop, sequence_mask is MIS)",
        choices=TIS_MODES,
    )
    get_mismatch_metrics: bool = setting(
        False, "Report what --use-tis (or --custom-tis-function-path) would do, without changing the loss"
    )
    tis_clip: float = setting(2.0, "Upper bound of the weight of --use-tis", above=0, aliases=("tis-threshold",))
    tis_clip_low: float = setting(0.0, "Lower bound of the weight of --use-tis", minimum=0)
    use_routing_replay: bool = setting(
        False,
        "Train with the experts that the pass of old log-probs chose (mixtures of experts; R2); the engine's: "
        "--use-rollout-routing-replay",
    )
    use_opsm: bool = setting(False, "Drop off-policy sequences with a negative advantage")
    opsm_delta: float = setting(1e-4, "Sequence KL above which --use-opsm drops a sequence", minimum=0)
    custom_reward_post_process_path: str | None = setting(
        None, "Function that replaces the normalisation of rewards", metavar="PATH"
    )
    custom_advantage_function_path: str | None = setting(None, "Function that replaces the advantages", metavar="PATH")
    custom_convert_samples_to_train_data_path: str | None = setting(
        None, "Function that makes the training data from all samples of an iteration", metavar="PATH"
    )
    rollout_data_postprocess_path: str | None = setting(
        None, "Function called with an iteration's log-probs and advantages before its first update", metavar="PATH"
    )
    custom_tis_function_path: str | None = setting(
        None, "Function that replaces the weights of --use-tis", metavar="PATH"
    )
    custom_pg_loss_reducer_function_path: str | None = setting(
        None, "Function that replaces the reduction of the policy loss", metavar="PATH"
    )

    # Batches
    # None: the trainer of another launcher checks no batch against it.
    rollout_batch_size: int | None = like(BatchSettings, "rollout_batch_size", default=None)
    global_batch_size: int | None = setting(None, "Trajectories per optimizer update", minimum=1)
    num_steps_per_rollout: int | None = setting(None, "Optimizer updates per iteration", minimum=1)
    micro_batch_size: int = setting(1, "Samples per forward pass", minimum=1)
    use_dynamic_batch_size: bool = setting(False, "Fill forward passes up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = setting(None, "Most tokens per forward pass", minimum=1)
    log_probs_max_tokens_per_gpu: int | None = setting(
        None, "Most tokens per forward pass that only computes log-probs (default: --max-tokens-per-gpu)", minimum=1
    )
    balance_data: bool = setting(False, "Give ranks micro-batches of equal work")
    balance_by_flops: bool = setting(
        False,
        "Form forward passes of equal FLOPs, at least as many as --max-tokens-per-gpu requires; some may "
        "exceed it. Implies --balance-data",
    )
    use_dynamic_global_batch_size: bool = setting(
        False, "Make one optimizer update per iteration, of all its trajectories"
    )
    data_pad_size_multiplier: int = setting(
        1,
        "Pad the tokens of a forward pass to a multiple of this and of the number of tensor-parallel ranks",
        minimum=1,
    )
    log_probs_chunk_size: int = setting(
        -1,
        "Positions whose logits become float32 and then log-probs at a time; 0 or less takes all. The fsdp backend "
        "ignores it with --compile, which makes no float32 logits",
    )
    step_wait_seconds: float = setting(600.0, "Seconds to wait for an iteration's groups and for its plan", above=0)

    # Weights to the engines
    update_weight_mode: str = setting("full", "Weights to push: all of them", choices=("full",), refused=("delta",))
    update_weight_transport: str = setting(
        "auto",
        "Transport of weights to the engines; auto: tensor for embedded engines, ipc for SGLang with "
        "--colocate, else nccl",
        choices=("auto", "tensor", "disk", "ipc", "nccl"),
    )
    update_weight_buffer_size: int = setting(512 * 1024**2, "Size of one bucket of weights, in bytes", minimum=1)
    update_weight_dtype: str = setting(
        "auto",
        "Data type of pushed weights; auto: bfloat16 if the trainer computes in it, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    update_weight_disk_dir: str | None = setting(
        None,
        "Directory, shared with the engines, for --update-weight-transport disk and --check-weight-update-equal",
        metavar="DIR",
    )
    update_weight_disk_keep_files: bool = setting(False, "Keep published weights after the engines have read them")
    update_weight_timeout_seconds: float = setting(300.0, "Deadline in seconds of one request to an engine", above=0)
    check_weight_update_equal: bool = setting(
        False,
        "Compare the engines' weights after every update with the same weights read from --update-weight-disk-dir, or "
        "from a temporary directory without it",
    )
    offload_train: bool | None = setting(
        None,
        "Free the trainer's GPU memory (weights, gradients, optimizer) while it is idle (default: with --colocate, as "
        "long as it has no room beside the engines, which is measured after each update); has no effect without GPUs",
    )

    # Process
    trainer_num_threads: int | None = setting(None, "CPU threads of torch in a trainer process", minimum=1)
    distributed_backend: str | None = setting(
        None,
        "Library for the trainer's collective operations (default: nccl on GPUs, else gloo)",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: float = setting(10, "Deadline in minutes of a collective operation", above=0)

    def __post_init__(self) -> None:
        if self.balance_by_flops:
            self.balance_data = True
        refuse_unavailable(self)
        self.check_debugging()
        refuse_contradictions(self)

    @property
    def updates_per_iteration(self) -> int:
        """Optimizer updates of an iteration, as far as the settings say."""
        if self.use_dynamic_global_batch_size or self.num_steps_per_rollout:
            return self.num_steps_per_rollout or 1
        if self.global_batch_size and self.rollout_batch_size:
            return max(1, self.rollout_batch_size * self.n_samples_per_prompt // self.global_batch_size)
        return 1

    @property
    def depends_on_length(self) -> bool:
        """True if the learning rates depend on --lr-decay-iters."""
        return self.lr_decay_style != "constant" or bool(self.lr_warmup_fraction)

    @property
    def warmup_updates(self) -> int:
        """Optimizer updates of warm-up."""
        if self.lr_warmup_fraction is None or self.lr_decay_iters is None:
            return self.lr_warmup_iters
        return round(self.lr_warmup_fraction * self.lr_decay_iters)

    @property
    def use_critic(self) -> bool:
        """True if a critic is trained."""
        return self.compute_advantages_and_returns and find_estimator(self.advantage_estimator).critic

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_loss or self.kl_coef != 0

    @property
    def loads_teacher(self) -> bool:
        """True if the trainer has a model to distil from."""
        return self.use_opd and self.opd_type != "sglang"

    @property
    def reads_rollout_log_probs(self) -> bool:
        return self.use_tis or self.use_rollout_logprobs or self.get_mismatch_metrics

    @property
    def advantages_alone_train(self) -> bool:
        """True if a sample whose advantages are all 0 adds no gradient to the policy's loss."""
        other_terms = self.use_kl_loss or self.kl_coef or self.entropy_coef or self.custom_tis_function_path
        # A critic learns from every sample.
        other_terms = other_terms or self.use_critic or self.use_opd
        return self.loss_type == "policy_loss" and not other_terms

    def on(self, device_type: str) -> TrainerSettings:
        """Returns the settings with the defaults that depend on the trainer's device, "cuda" or "cpu"."""
        on_gpu = device_type == "cuda"
        return dataclasses.replace(
            self,
            bf16=on_gpu if self.bf16 is None else self.bf16,
            compile=on_gpu if self.compile is None else self.compile,
        )

    @property
    def offloads_train(self) -> bool:
        """True if the trainer's GPU memory is released while it is idle, unless it is found to have room there."""
        return self.colocate if self.offload_train is None else self.offload_train

    @property
    def wire_dtype(self) -> str:
        """Name of the torch dtype in which weights go to the engines."""
        if self.update_weight_dtype != "auto":
            return self.update_weight_dtype
        return "bfloat16" if self.bf16 else "float32"


def flat_args(settings: TrainerSettings, extra: dict[str, Any] | None = None) -> Any:
    """Makes the `args` namespace that plug-ins receive: every setting by its name, and names that the launcher adds."""
    import argparse

    return argparse.Namespace(**{**(extra or {}), **dataclasses.asdict(settings)})
