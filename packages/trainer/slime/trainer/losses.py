"""From a model's outputs on one packed row to the scalar that is minimised, and the sums that become metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.trainer.algorithms.aggregation import weighted_sum
from slime.trainer.algorithms.importance import truncated_importance
from slime.trainer.algorithms.kl import approximate_kl
from slime.trainer.algorithms.policy_loss import cispo_loss, clipped_loss, off_policy_weights, sequence_kl
from slime.trainer.backends.base import Outputs
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.settings import TrainerSettings, flat_args
from slime.types.plugins import load_plugin

Sums = dict[str, Any]

# Sums over the whole update's weights: the terms of the loss. All others are means over the tokens that were computed.
LOSS_TERMS = frozenset({"loss", "pg_loss", "kl_loss"})


@dataclasses.dataclass
class Targets:
    """What a packed row is trained towards; all [K] float32, fixed while the update runs."""

    advantages: Tensor
    # None: the policy itself, which is exact where an update is the first since the samples were made.
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    # Advantages before whitening.
    returns: Tensor
    # The policy's before the update, where `old_log_probs` are the engine's and it is not the policy itself.
    train_log_probs: Tensor | None = None
    entropy: Tensor | None = None


class Loss:
    """The loss of one trainer, with the plug-ins that its settings name loaded and checked."""

    def __init__(self, settings: TrainerSettings, extra_args: dict[str, Any] | None = None) -> None:
        self.settings = settings
        self.args = flat_args(settings, extra_args)
        self._tis = _plugin(
            settings.custom_tis_function_path,
            "--custom-tis-function-path",
            keywords=(
                "args",
                "pg_loss",
                "train_log_probs",
                "rollout_log_probs",
                "loss_masks",
                "total_lengths",
                "response_lengths",
            ),
        )
        self._reducer = _plugin(
            settings.custom_pg_loss_reducer_function_path,
            "--custom-pg-loss-reducer-function-path",
            ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
        )

    @property
    def entropy(self) -> str:
        """How entropies are needed: see `Backend.forward_backward`."""
        if self.settings.loss_type != "policy_loss":
            return "none"
        return "gradient" if self.settings.entropy_coef else "value"

    def __call__(
        self, batch: PackedBatch, outputs: Outputs, targets: Targets | None, denominator: float, sums: Sums
    ) -> Tensor:
        """The loss of one row, its metrics added to `sums`.

        denominator: rollouts of the update, or its tokens with per-token loss; used by a custom reducer alone.
        """
        if self.settings.loss_type == "sft_loss":
            loss = weighted_sum(-outputs.log_probs, batch.weights)
            return _add(sums, {"loss": loss}, loss)
        assert targets is not None
        return self._policy_loss(batch, outputs, targets, denominator, sums)

    def _policy_loss(
        self, batch: PackedBatch, outputs: Outputs, targets: Targets, denominator: float, sums: Sums
    ) -> Tensor:
        s = self.settings
        log_probs, advantages = outputs.log_probs, targets.advantages
        old = log_probs.detach() if targets.old_log_probs is None else targets.old_log_probs
        ppo_kl = old - log_probs
        tokens: dict[str, Tensor] = {"ppo_kl": ppo_kl}
        if s.advantage_estimator == "gspo":
            ppo_kl = sequence_kl(ppo_kl, batch.mask, batch.segments, batch.num_samples)
        if s.advantage_estimator == "cispo":
            pg_loss, clipped = cispo_loss(ppo_kl, log_probs, advantages, s.eps_clip, s.eps_clip_high)
        else:
            pg_loss, clipped = clipped_loss(ppo_kl, advantages, s.eps_clip, s.eps_clip_high, s.eps_clip_c)
        tokens["pg_clipfrac"] = clipped
        if s.use_opsm:
            kept = off_policy_weights(
                old - log_probs, advantages, batch.mask, batch.segments, batch.num_samples, s.opsm_delta
            )
            pg_loss = pg_loss * kept
            tokens["opsm_clipfrac"] = 1 - kept
        weights, mask = batch.weights, batch.mask
        if s.use_tis or s.get_mismatch_metrics:
            trained = old
            if s.use_rollout_logprobs:
                trained = log_probs.detach() if targets.train_log_probs is None else targets.train_log_probs
            corrected, corrected_mask, metrics = self._correct_mismatch(batch, pg_loss, trained)
            tokens |= metrics
            if s.use_tis:
                # Changed masks change the numerator only: the weights keep the plan's denominators.
                pg_loss, weights, mask = corrected, weights * corrected_mask, corrected_mask
        if self._reducer is None:
            pg = weighted_sum(pg_loss, weights)
        else:
            masks = list(mask.split(batch.lengths))
            reduce = self._reducer(batch.total_lengths, batch.lengths, masks, s.calculate_per_token_loss)
            pg = reduce(pg_loss) / denominator
        loss, terms = pg, {"pg_loss": pg}
        if outputs.entropy is not None:
            tokens["entropy_loss"] = outputs.entropy
            if s.entropy_coef:
                loss = loss - s.entropy_coef * weighted_sum(outputs.entropy, batch.weights)
        if s.use_kl_loss:
            assert targets.ref_log_probs is not None
            ratio = torch.exp(log_probs - old) if s.use_unbiased_kl else None
            kl = weighted_sum(approximate_kl(log_probs, targets.ref_log_probs, s.kl_loss_type, ratio), batch.weights)
            terms["kl_loss"] = kl
            loss = loss + s.kl_loss_coef * kl
        if batch.rollout_log_probs is not None:
            tokens["train_rollout_logprob_abs_diff"] = (log_probs.detach() - batch.rollout_log_probs).abs()
        for name, values in tokens.items():
            terms[name] = weighted_sum(values.detach(), batch.weights)
        return _add(sums, {"loss": loss, "weight": batch.weights.sum(), **terms}, loss)

    def _correct_mismatch(
        self, batch: PackedBatch, pg_loss: Tensor, old: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(loss [K], the masks that the function returned [K], metrics [K])."""
        s = self.settings
        assert batch.rollout_log_probs is not None
        if self._tis is None:
            weights, metrics = truncated_importance(old, batch.rollout_log_probs, s.tis_clip_low, s.tis_clip)
            return pg_loss * weights, batch.mask, metrics
        lengths = batch.lengths
        pg_loss, masks, metrics = self._tis(
            args=self.args, pg_loss=pg_loss, train_log_probs=list(old.split(lengths)),
            rollout_log_probs=list(batch.rollout_log_probs.split(lengths)), loss_masks=list(batch.mask.split(lengths)),
            total_lengths=batch.total_lengths, response_lengths=lengths,
        )  # fmt: skip
        return pg_loss, torch.cat(list(masks)).to(batch.mask), metrics


def _plugin(
    path: str | None, flag: str, parameters: tuple[str, ...] = (), keywords: tuple[str, ...] = ()
) -> Callable[..., Any] | None:
    return None if path is None else load_plugin(path, flag=flag, parameters=parameters, keywords=keywords)


def _add(sums: Sums, terms: dict[str, Any], loss: Tensor) -> Tensor:
    # Kept on the device: reading a number would make the host wait in every micro-batch.
    for name, value in terms.items():
        sums[name] = sums.get(name, 0.0) + value.detach().double()
    return loss
