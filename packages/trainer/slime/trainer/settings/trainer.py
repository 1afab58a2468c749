"""The settings of a trainer: model, optimizer, batches, weights to the engines, process."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from slime.trainer.settings.algorithm import AlgorithmSettings
from slime.trainer.settings.checks import ALL_LINEAR, refuse_contradictions
from slime.trainer.settings.debug import DebugSettings
from slime.types.settings import like, setting
from slime.types.shared_settings import BatchSettings, GroupSettings, ModeSettings, PolicySettings, TrainingSettings
from slime.types.weight_deltas.checksums import CHECKSUMS
from slime.types.weight_deltas.encoding import OPERATIONS


@dataclasses.dataclass(kw_only=True)
class TrainerSettings(AlgorithmSettings, PolicySettings, GroupSettings, TrainingSettings, ModeSettings, DebugSettings):
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
        "where that takes at most half of a GPU in bfloat16, reference and teacher counted (a quarter beside a critic)",
        choices=("auto", "optimizer", "parameters"),
    )
    true_on_policy_mode: bool = setting(
        False,
        "Train only on samples of the weights that are updated: one optimizer update per iteration, and a weight "
        "update after each; conflicting flags are an error. On a Hopper GPU, --train-backend fsdp then computes a "
        "dense Qwen3 or Llama with heads of 128 by SGLang's deterministic kernels, so that log-probs are the engine's "
        "bit for bit; elsewhere they differ by rounding",
    )
    activation_memory_budget: float = setting(
        1.0,
        "Share of its activations that a compiled layer keeps for the backward pass; it recomputes the rest, the "
        "cheapest first: less memory for more work",
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
    train_vision: bool | None = setting(
        None,
        "Build and train the part of a dense Qwen3.5 that reads images, as a run on images needs: --multimodal-keys "
        "turns it on. Every other model that reads images is trained whole",
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

    # LoRA
    lora_rank: int = setting(
        0,
        "Train LoRA adapters of this rank, W + (alpha / rank) B A, in place of the weights, which stay frozen; engines "
        "get merged weights (fsdp); 0 trains all weights. A critic trains all of its own",
        minimum=0,
    )
    lora_alpha: float = setting(32.0, "Alpha of the LoRA adapters: their update is scaled by alpha / rank", above=0)
    lora_target_modules: list[str] = setting(
        lambda: [ALL_LINEAR],
        "Linear layers that get LoRA adapters, by the ends of their names: q_proj v_proj; all-linear stands for all of "
        "the decoder, without the output layer: all-linear lm_head takes that too",
        metavar="NAME",
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
        "Optimizer updates of the policy until the learning rate is --min-lr, warm-up included (default: those of the "
        "run); a critic's rate is --min-lr in the same iteration",
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

    # Batches
    # None: the trainer of another launcher checks no batch against it.
    rollout_batch_size: int | None = like(BatchSettings, "rollout_batch_size", default=None)
    global_batch_size: int | None = setting(None, "Trajectories per optimizer update", minimum=1)
    num_steps_per_rollout: int | None = setting(None, "Optimizer updates per iteration", minimum=1)
    micro_batch_size: int = setting(1, "Samples per forward pass", minimum=1)
    use_dynamic_batch_size: bool = setting(False, "Fill forward passes up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = setting(None, "Maximum tokens per forward pass", minimum=1)
    log_probs_max_tokens_per_gpu: int | None = setting(
        None, "Maximum tokens per forward pass that only computes log-probs (default: --max-tokens-per-gpu)", minimum=1
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
        "Pad the tokens of a forward pass to a multiple of this; with Megatron of this times the tensor-parallel ranks "
        "(above 1, or with --sequence-parallel), times twice the context-parallel ranks where there are several",
        minimum=1,
    )
    log_probs_chunk_size: int = setting(
        -1,
        "Positions whose logits become float32 and then log-probs at a time; 0 or less takes all. The fsdp backend "
        "ignores it with --compile, which makes no float32 logits",
    )
    step_wait_seconds: float = setting(600.0, "Seconds to wait for an iteration's groups and for its plan", above=0)

    # Weights to the engines
    update_weight_transport: str = setting(
        "auto",
        "Transport of weights to the engines; auto: tensor for embedded engines, ipc for SGLang with "
        "--colocate (not for deltas), else nccl",
        choices=("auto", "tensor", "disk", "ipc", "nccl"),
    )
    update_weight_buffer_size: int = setting(512 * 1024**2, "Size of one bucket of weights, in bytes", minimum=1)
    update_weight_dtype: str = setting(
        "auto",
        "Data type of pushed weights; auto: bfloat16 if the trainer computes in it, else float32",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    update_weight_quantization: str = setting(
        "auto",
        "Quantization of pushed weights; auto: FP8 in blocks or INT4 in groups of those weights that --hf-checkpoint "
        "holds in it; none: no weight, for engines whose config.json is another one",
        choices=("auto", "none"),
    )
    update_weight_disk_dir: str | None = setting(
        None,
        "Directory, shared with the engines, for --update-weight-transport disk and --check-weight-update-equal",
        metavar="DIR",
    )
    update_weight_disk_keep_files: bool = setting(False, "Keep published weights after the engines have read them")
    custom_update_weight_post_write_path: str | None = setting(
        None,
        "Function that is called after the files of a weight update are written and before engines read them: where a "
        "disk shows writes to other hosts only after a step of its own",
        metavar="PATH",
    )
    update_weight_delta_encoding: str = setting(
        "xor",
        "Content of a delta: the bits that differ (xor, which compresses best), or the new values (overwrite)",
        choices=OPERATIONS,
    )
    update_weight_delta_checksum: str = setting(
        "xxh3-128", "Checksum by which an engine verifies each tensor after a delta", choices=CHECKSUMS
    )
    update_weight_local_checkpoint_dir: str | None = setting(
        None,
        "Directory on the hosts of SGLang engines for a checkpoint that deltas bring up to date and the engines load",
        metavar="DIR",
    )
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
    trainer_num_threads: int | None = setting(
        None,
        "CPU threads of torch in a trainer process (default: OMP_NUM_THREADS, else a share of all cores; 1 with GPUs "
        "and for models narrower than 256)",
        minimum=1,
    )
    distributed_backend: str | None = setting(
        None,
        "Library for the trainer's collective operations (default: nccl on GPUs, else gloo)",
        choices=("nccl", "gloo"),
    )
    distributed_timeout_minutes: float = setting(10, "Deadline in minutes of a collective operation", above=0)

    def __post_init__(self) -> None:
        if self.balance_by_flops:
            self.balance_data = True
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
    def critic_only_updates(self) -> int:
        """Updates of the critic before the first one of the policy."""
        return self.num_critic_only_steps * self.updates_per_iteration

    def of_critic(self) -> TrainerSettings:
        """Returns the settings of the critic: its own learning rates; all of its parameters train, without plug-ins for
        the policy."""
        decay = self.lr_decay_iters
        return dataclasses.replace(
            self, lr=self.critic_lr or self.lr, lr_warmup_iters=self.critic_lr_warmup_iters, lr_warmup_fraction=None,
            lr_decay_iters=None if decay is None else decay + self.critic_only_updates,
            only_train_params_name_list=None, freeze_params_name_list=None, enable_mtp_training=False,
            custom_megatron_init_path=None, custom_megatron_before_log_prob_hook_path=None,
            custom_megatron_before_train_step_hook_path=None, compile=False, true_on_policy_mode=False, lora_rank=0,
            lora_alpha=type(self).lora_alpha, lora_target_modules=[ALL_LINEAR],
        )  # fmt: skip

    @property
    def reference_is_base(self) -> bool:
        """True if the reference model is the base model of LoRA adapters, which the policy is without them."""
        own = self.ref_load is None or os.path.realpath(self.ref_load) == os.path.realpath(self.hf_checkpoint)
        return self.lora_rank > 0 and self.needs_reference and own

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
