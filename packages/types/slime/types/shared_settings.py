"""Settings of several packages, each declared once; packages inherit the classes that they need.

Under `slime train` one flag sets a value for all packages; a service by itself has the same flag, with the same help,
range and default.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.types.settings import REQUIRED, setting

# Engines treat a lower temperature as greedy, and logits divided by it may overflow.
LOWEST_TEMPERATURE = 1e-6


@dataclass(kw_only=True)
class PolicySettings:
    """The policy and how it is sampled."""

    hf_checkpoint: str = setting(
        REQUIRED,
        "Hugging Face directory with the config, the tokenizer and the initial weights; `slime train` also takes the "
        "name of a model on the Hub, ORG/NAME[@REVISION]",
        metavar="DIR",
    )
    rollout_temperature: float = setting(
        1.0, "Sampling temperature; the trainer divides logits by it", minimum=LOWEST_TEMPERATURE
    )
    rollout_top_p: float = setting(
        1.0, "Top-p (nucleus) sampling; below 1 the trainer's softmax is over the nucleus that was sampled from",
        above=0, maximum=1,
    )  # fmt: skip
    rollout_top_k: int = setting(
        -1, "Top-k sampling, -1 for off; with it the trainer's softmax is over the tokens that were sampled from",
        minimum=-1,
    )  # fmt: skip
    use_rollout_routing_replay: bool = setting(
        False, "Send each token to the experts that the engine sent it to, in every pass of the policy (R3)"
    )
    rollout_external_engine_addrs: list[str] | None = setting(
        None, "Addresses of engines that already run, as HOST:PORT", metavar="HOST:PORT"
    )

    @property
    def samples_from_nuclei(self) -> bool:
        """True if top-p or top-k leave only a part of the vocabulary to sample from: the nucleus."""
        return self.rollout_top_p < 1 or self.rollout_top_k != -1


@dataclass(kw_only=True)
class BatchSettings:
    """Groups of an iteration."""

    rollout_batch_size: int = setting(32, "Groups (prompts) per iteration", minimum=1)


@dataclass(kw_only=True)
class GroupSettings:
    """Samples of a group."""

    n_samples_per_prompt: int = setting(1, "Samples generated per prompt (the group size)", minimum=1)
    reward_key: str | None = setting(None, "Key of the reward to train on where rewards are dicts")


@dataclass(kw_only=True)
class PromptSettings:
    """Seed of generation and size of evaluation groups."""

    rollout_seed: int = setting(42, "Seed of shuffling and sampling: epoch e is shuffled with seed + e")
    n_samples_per_eval_prompt: int = setting(1, "Samples generated per prompt of an evaluation set", minimum=1)


@dataclass(kw_only=True)
class TrainingSettings:
    """Implementation, seed and checkpoints of the trainer."""

    train_backend: str = setting(
        "fsdp",
        "Trainer implementation; one of Megatron's flags without --train-backend selects megatron in `slime train`",
        choices=("fsdp", "megatron"),
    )
    save: str | None = setting(
        None, "Directory of checkpoints (default of `slime train`: checkpoints below --output-dir)", metavar="DIR"
    )
    start_rollout_id: int | None = setting(
        None, "Number of the first iteration (default: the one after the checkpoint's, else 0)", minimum=0
    )
    seed: int = setting(1234, "Seed of the trainer's random numbers", minimum=0, maximum=2**32 - 1)


@dataclass(kw_only=True)
class EngineSettings:
    """GPUs of the engines."""

    rollout_num_gpus: int | None = setting(
        None,
        "GPUs for generation; 0: engines run elsewhere, see --rollout-external-engine-addrs (default of `slime train`: "
        "one, or with --colocate the trainer's; of slime-rollout: all visible ones)",
        minimum=0,
    )


@dataclass(kw_only=True)
class ModeSettings:
    """Modes of a whole run."""

    colocate: bool = setting(False, "Let trainer and engines share GPUs; has no effect without GPUs")
    deterministic: bool = setting(
        False,
        "Generate in index order, in fixed batches, with keyed sampling, and train with deterministic kernels: two "
        "runs on one machine give the same samples, metrics and weights",
    )
    update_weight_mode: str = setting(
        "full",
        "Content of a weight update: all weights (full), or what changed since the engine's version (delta)",
        choices=("full", "delta"),
    )
