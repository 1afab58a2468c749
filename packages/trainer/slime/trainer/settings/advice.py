"""Warns about settings that are valid and probably not what was meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.trainer.algorithms.estimators import constant_ratio, find_estimator

if TYPE_CHECKING:
    from slime.trainer.settings.trainer import TrainerSettings


def advice(settings: TrainerSettings, *, asynchronous: bool = False) -> Iterator[str]:
    """Yields a sentence for each doubt. asynchronous: rollouts are generated with older weights than the trainer's."""
    s = settings
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
