"""The settings of a trainer."""

from __future__ import annotations

import dataclasses
from typing import Any

from slime.trainer.contradictions import refuse_contradictions, refuse_unavailable
from slime.trainer.debug_settings import DebugSettings
from slime.trainer.estimators import ESTIMATORS, TIS_MODES
from slime.types.settings import REQUIRED, setting


@dataclasses.dataclass(kw_only=True)
class TrainerSettings(DebugSettings):
    """Trainer."""

    # Model, checkpoints
    hf_checkpoint: str = setting(
        REQUIRED, "Hugging Face directory of the initial weights and the tokenizer", metavar="DIR"
    )
    load: str | None = setting(None, "checkpoint to resume from; its weights, optimizer and step", metavar="DIR")
    save: str | None = setting(None, "directory for checkpoints", metavar="DIR")
    start_rollout_id: int | None = setting(
        None, "number of the first rollout (default: the one after the checkpoint's, else 0)", minimum=0
    )
    ref_load: str | None = setting(
        None,
        "Hugging Face directory, or torch_dist checkpoint (megatron), of the reference model; default --hf-checkpoint",
        metavar="DIR",
    )
    train_backend: str = setting("fsdp", "trainer implementation", choices=("fsdp", "megatron"))
    model_name: str | None = setting(
        None, "family of models to take it for, in place of the model_type in config.json (megatron)", metavar="NAME"
    )
    bf16: bool | None = setting(
        None, "compute in bfloat16; weights and optimizer stay float32 (default: on GPUs, and float32 on a CPU)"
    )
    compile: bool | None = setting(
        None,
        "run the model's layers and log-probs through torch.compile, and rows that come again as CUDA graphs where "
        "the trainer keeps its memory (fsdp; default: on GPUs, not on a CPU)",
    )
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass")
    recompute_loss_function: bool = setting(
        False, "keep no float32 copy of the logits for the backward pass: make it again there"
    )
    no_save_optim: bool = setting(False, "leave the optimizer out of checkpoints")
    async_save: bool = setting(False, "go on training while a checkpoint is written (megatron)")
    only_train_params_name_list: list[str] | None = setting(
        None, "regular expressions, searched in Megatron's parameter names: only these train (megatron)", metavar="RE"
    )
    freeze_params_name_list: list[str] | None = setting(
        None, "regular expressions, searched in Megatron's parameter names: these do not train (megatron)", metavar="RE"
    )
    enable_mtp_training: bool = setting(False, "train the multi-token-prediction layers too (megatron)")
    custom_model_provider_path: str | None = setting(
        None, "makes the model, in place of ours (megatron)", metavar="PATH"
    )
    custom_megatron_init_path: str | None = setting(
        None, "called once Megatron's process groups are there (megatron)", metavar="PATH"
    )
    custom_megatron_before_log_prob_hook_path: str | None = setting(
        None, "called before each pass that only computes log-probs (megatron)", metavar="PATH"
    )
    custom_megatron_before_train_step_hook_path: str | None = setting(
        None, "called before each optimizer update (megatron)", metavar="PATH"
    )

    # Optimizer
    lr: float = setting(1e-6, "peak learning rate", above=0)
    min_lr: float = setting(0.0, "learning rate at the end of the decay", minimum=0)
    lr_decay_style: str = setting("constant", "shape of the decay", choices=("constant", "linear", "cosine"))
    lr_warmup_iters: int = setting(0, "optimizer updates of linear warm-up", minimum=0)
    lr_decay_iters: int | None = setting(None, "optimizer updates until --min-lr, warm-up included", minimum=1)
    weight_decay: float = setting(0.01, "AdamW decay of matrices; vectors are not decayed", minimum=0)
    adam_beta1: float = setting(0.9, "AdamW beta1", minimum=0, maximum=1)
    adam_beta2: float = setting(0.999, "AdamW beta2", minimum=0, maximum=1)
    adam_eps: float = setting(1e-8, "AdamW epsilon", above=0)
    reset_optimizer_states: bool = setting(
        False, "forget AdamW's moments and their step count before each rollout's training"
    )
    skip_nonfinite_updates: bool = setting(
        False,
        "Go on after an update whose gradient is infinite or not a number, which leaves weights and optimizer as they "
        "are, and log what made it; without it the run ends",
    )
    clip_grad: float = setting(1.0, "largest gradient norm; 0 turns clipping off", minimum=0)

    # Loss
    loss_type: str = setting("policy_loss", "what is minimised", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = setting(None, "loss function of --loss-type custom_loss", metavar="PATH")
    advantage_estimator: str = setting("grpo", "algorithm", choices=ESTIMATORS)
    compute_advantages_and_returns: bool = setting(
        True,
        "Compute advantages from the rewards",
        off_flag="disable-compute-advantages-and-returns",
        off_help="Compute no advantages: for --loss-type sft_loss, which needs none",
    )
    rewards_normalization: bool = setting(
        True,
        "Subtract the mean of its group from each reward",
        off_flag="disable-rewards-normalization",
        off_help="Keep rewards as they are: the mean of the group is not subtracted",
    )
    grpo_std_normalization: bool = setting(
        True,
        "Divide advantages by the standard deviation of their group",
        off_flag="disable-grpo-std-normalization",
        off_help="Subtract the mean of the group and do not divide by its standard deviation (Dr. GRPO)",
    )
    normalize_advantages: bool = setting(False, "whiten advantages over all tokens of a step")
    gamma: float = setting(1.0, "discount of reinforce_plus_plus", minimum=0, maximum=1)
    eps_clip: float = setting(0.2, "lower clip width of the ratio", minimum=0)
    eps_clip_high: float | None = setting(None, "upper clip width; default --eps-clip", minimum=0)
    eps_clip_c: float | None = setting(None, "dual-clip constant; off when unset", above=1)
    use_kl_loss: bool = setting(False, "load a reference model and report its KL; see --kl-loss-coef")
    kl_loss_coef: float = setting(0.0, "weight of the KL term in the loss", minimum=0)
    kl_loss_type: str = setting(
        "k1",
        "KL estimator; as a loss k2 has the gradient of the KL divergence, and k1 has it with --use-unbiased-kl alone",
        choices=("k1", "k2", "k3", "low_var_kl"),
    )
    use_unbiased_kl: bool = setting(False, "multiply the KL estimate by the importance ratio")
    kl_coef: float = setting(0.0, "KL penalty inside the reward (reinforce_plus_plus, ..._baseline)", minimum=0)
    use_rollout_entropy: bool = setting(
        False, "entropy of the policy before a rollout's updates: metric rollout/entropy, and for plug-ins"
    )
    ref_update_interval: int | None = setting(
        None, "the policy becomes the reference model after every N-th rollout's training", minimum=1
    )
    keep_old_actor: bool = setting(
        False, "old log-probs are those of the weights that made each token, of which copies stay in host memory"
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus")
    calculate_per_token_loss: bool = setting(False, "average over tokens, not over rollouts")
    use_rollout_logprobs: bool = setting(False, "the engine's log-probs are the old policy")
    use_tis: bool = setting(
        False, "weigh the policy loss by the trainer's probabilities over the engine's; see --tis-mode"
    )
    tis_mode: str = setting(
        "token_truncate",
        "Weight of --use-tis: the ratio of each token, or the product of the sample's, truncated to --tis-clip-low and "
        "--tis-clip, or 0 outside of them (token_mask is IcePop, sequence_mask MIS)",
        choices=TIS_MODES,
    )
    get_mismatch_metrics: bool = setting(
        False, "report what --use-tis would do, by its function or --custom-tis-function-path, and leave the loss alone"
    )
    tis_clip: float = setting(2.0, "upper bound of its weight", above=0, aliases=("tis-threshold",))
    tis_clip_low: float = setting(0.0, "lower bound of its weight", minimum=0)
    use_opsm: bool = setting(False, "drop off-policy sequences with a negative advantage")
    opsm_delta: float = setting(1e-4, "sequence KL above which --use-opsm drops", minimum=0)
    rollout_temperature: float = setting(1.0, "sampling temperature; logits are divided by it", above=0)
    reward_key: str | None = setting(None, "key of the reward where rewards are objects")
    custom_reward_post_process_path: str | None = setting(None, "replaces reward normalisation", metavar="PATH")
    custom_advantage_function_path: str | None = setting(None, "replaces the advantages", metavar="PATH")
    custom_convert_samples_to_train_data_path: str | None = setting(
        None, "makes what is trained on from all samples of a rollout", metavar="PATH"
    )
    rollout_data_postprocess_path: str | None = setting(
        None, "called with a rollout's log-probs and advantages before it is trained on", metavar="PATH"
    )
    custom_tis_function_path: str | None = setting(None, "replaces the weights of --use-tis", metavar="PATH")
    custom_pg_loss_reducer_function_path: str | None = setting(
        None, "replaces the reduction of the policy loss", metavar="PATH"
    )

    # Batches
    rollout_batch_size: int | None = setting(None, "groups of one rollout", minimum=1)
    n_samples_per_prompt: int = setting(1, "samples of one group", minimum=1)
    global_batch_size: int | None = setting(None, "rollouts of one optimizer update", minimum=1)
    num_steps_per_rollout: int | None = setting(None, "optimizer updates of one rollout", minimum=1)
    micro_batch_size: int = setting(1, "samples of one forward pass", minimum=1)
    use_dynamic_batch_size: bool = setting(False, "fill forward passes up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = setting(None, "tokens of one forward pass", minimum=1)
    log_probs_max_tokens_per_gpu: int | None = setting(
        None, "the same of passes that only compute log-probs; default --max-tokens-per-gpu", minimum=1
    )
    balance_data: bool = setting(False, "give ranks micro-batches of equal work")
    balance_by_flops: bool = setting(
        False,
        "form forward passes of equal FLOPs too, as many as --max-tokens-per-gpu needs at least, which some of them "
        "then exceed; turns on --balance-data",
    )
    use_dynamic_global_batch_size: bool = setting(
        False, "one optimizer update for each rollout, of all rollouts that there are"
    )
    data_pad_size_multiplier: int = setting(
        1, "tokens of a forward pass are padded to a multiple of it, and of tensor parallel ranks", minimum=1
    )
    log_probs_chunk_size: int = setting(-1, "positions whose logits become log-probs at once; all when 0 or less")
    step_wait_seconds: float = setting(600.0, "how long to wait for a step's groups and for its plan", above=0)

    # Weights to the engines
    update_weight_mode: str = setting("full", "whole weights, or what changed", choices=("full", "delta"))
    update_weight_transport: str = setting(
        "auto",
        "how weights reach the engines; auto: tensor for embedded ones, ipc for SGLang's with --colocate, else nccl",
        choices=("auto", "tensor", "disk", "ipc", "nccl"),
    )
    update_weight_buffer_size: int = setting(512 * 1024**2, "bytes of one bucket", minimum=1)
    update_weight_dtype: str = setting(
        "auto",
        "type on the wire; auto: bfloat16 where the trainer computes in it, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    update_weight_disk_dir: str | None = setting(
        None, "directory, shared with the engines, of transport disk and of --check-weight-update-equal", metavar="DIR"
    )
    update_weight_disk_keep_files: bool = setting(False, "keep published versions after the engines read them")
    update_weight_timeout_seconds: float = setting(300.0, "deadline of one request to an engine", above=0)
    check_weight_update_equal: bool = setting(
        False,
        "hold every update's weights in the engines against the same ones read from a directory (default: a temporary "
        "one; see --update-weight-disk-dir)",
    )
    colocate: bool = setting(False, "trainer and engines share GPUs; changes nothing where there is no GPU")
    offload_train: bool | None = setting(
        None,
        "weights, gradients and optimizer leave the GPU while the trainer is idle (default: with --colocate); changes "
        "nothing where there is no GPU",
    )
    rollout_external_engine_addrs: list[str] | None = setting(
        None, "host:port of engines that run already", metavar="HOST:PORT"
    )

    # Process
    seed: int = setting(1234, "seed of torch", minimum=0, maximum=2**32 - 1)
    deterministic: bool = setting(False, "the same numbers bit for bit on the same machine")
    trainer_num_threads: int | None = setting(None, "threads of torch in a trainer process", minimum=1)
    distributed_backend: str | None = setting(
        None,
        "library of the trainer's collective operations (default: nccl on GPUs, else gloo)",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: float = setting(10, "deadline of a collective operation", above=0)

    def __post_init__(self) -> None:
        if self.balance_by_flops:
            self.balance_data = True
        refuse_unavailable(self)
        self.check_debugging()
        refuse_contradictions(self)

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_loss or self.kl_coef != 0

    @property
    def advantages_alone_train(self) -> bool:
        """Whether a sample whose advantages are all 0 adds no gradient to the policy's loss."""
        other_terms = self.use_kl_loss or self.kl_coef or self.entropy_coef or self.custom_tis_function_path
        return self.loss_type == "policy_loss" and not other_terms

    def on(self, device_type: str) -> TrainerSettings:
        """What is meant where the trainer's device is "cuda" or "cpu"."""
        on_gpu = device_type == "cuda"
        return dataclasses.replace(
            self,
            bf16=on_gpu if self.bf16 is None else self.bf16,
            compile=on_gpu if self.compile is None else self.compile,
        )

    @property
    def offloads_train(self) -> bool:
        """Whether the trainer's GPU memory is released while it is idle."""
        return self.colocate if self.offload_train is None else self.offload_train

    @property
    def wire_dtype(self) -> str:
        """Name of the torch dtype in which weights go to the engines."""
        if self.update_weight_dtype != "auto":
            return self.update_weight_dtype
        return "bfloat16" if self.bf16 else "float32"


def flat_args(settings: TrainerSettings, extra: dict[str, Any] | None = None) -> Any:
    """The `args` namespace that plug-ins receive: every setting by its name, over what the launcher adds."""
    import argparse

    return argparse.Namespace(**{**(extra or {}), **dataclasses.asdict(settings)})
