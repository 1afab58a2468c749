"""The algorithm among the settings of a trainer: loss, advantages, corrections, teacher and critic."""

from __future__ import annotations

import dataclasses

from slime.trainer.algorithms.estimators import ESTIMATORS, estimators_that, find_estimator
from slime.types.settings import setting

# Kinds of weights that correct for the mismatch of engine and trainer; see `algorithms.importance`.
TIS_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Values of a setting of the same name that functions for --custom-tis-function-path read.
TIS_MODES_OF_FUNCTIONS = ("truncate", "clip", "mask")
# Where the log-probs of a teacher come from.
OPD_TYPES = ("sglang", "trainer", "megatron")


@dataclasses.dataclass(kw_only=True)
class AlgorithmSettings:
    """Algorithm of the trainer."""

    loss_type: str = setting("policy_loss", "Loss to minimize", choices=("policy_loss", "sft_loss", "custom_loss"))
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
        "Divide the rewards of a group, minus their mean, by their standard deviation",
        off_flag="disable-grpo-std-normalization",
        off_help="Do not divide the centred rewards of a group by their standard deviation, as GRPO does (Dr. GRPO)",
    )
    grpo_std_scope: str = setting(
        "group",
        "Rewards whose standard deviation divides the centred ones: those of the group, or of the whole iteration "
        "(batch), with which a group of nearly equal rewards weighs no more than others (Liu et al., arXiv:2508.08221)",
        choices=("group", "batch"),
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
        "--tis-clip-low and --tis-clip, or 0 outside of them (token_mask is IcePop, sequence_mask is MIS); with "
        "--custom-tis-function-path also truncate, clip or mask, for a function that reads args.tis_mode",
        choices=TIS_MODES,
        refused=TIS_MODES_OF_FUNCTIONS,
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
        None, "Function that replaces the normalization of rewards", metavar="PATH"
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
