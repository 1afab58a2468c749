"""The critic in a training step: values before the updates, and an update of its own for each of the policy's."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from slime.trainer.algorithms.aggregation import weighted_sum
from slime.trainer.backends.base import Backend, NonFiniteGradient, Outputs
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.targets import Work

log = logging.getLogger(__name__)
PREFIX = "train/critic-"


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(loss, 1 where the clipped value decides) per token; all tensors are [K], nothing is masked or averaged.

    As PPO's implementation has it (arXiv:2005.12729, section 3):
    loss = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), without a factor of 1/2.
    """
    unclipped = (values - returns).square()
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(values.dtype)


class CriticStep:
    """Trains `critic` on returns. Every method is collective."""

    def __init__(self, settings: TrainerSettings, critic: Backend, ranks: Ranks) -> None:
        self.settings = settings
        self.critic = critic
        self.ranks = ranks

    def values(self, work: Work) -> list[Tensor | None]:
        """[K] of each micro-batch, as the critic is now."""
        return [None if outputs is None else outputs.values for outputs in self.critic.scores(work.batches)]

    def train(self, updates: list[Work]) -> dict[str, float]:
        """Makes one optimizer update for each of `updates`, whose targets have values and returns.

        Returns metrics, those of updates averaged. Raises NonFiniteGradient unless such updates are to be skipped.
        """
        metrics = {f"{PREFIX}explained_variance": self._explained_variance(updates)}
        if self.settings.reset_optimizer_states:
            self.critic.reset_optimizer()
        done = [found for found in map(self._update, updates) if found is not None]
        for name in done[0] if done else ():
            metrics[f"{PREFIX}{name}"] = sum(found[name] for found in done) / len(done)
        if done:
            metrics[f"{PREFIX}lr-pg_0"] = done[-1]["lr-pg_0"]
        if self.settings.skip_nonfinite_updates:
            metrics[f"{PREFIX}nonfinite_updates"] = len(updates) - len(done)
        return metrics

    def _update(self, work: Work) -> dict[str, float] | None:
        sums: dict[str, Tensor] = {}

        def loss(number: int, batch: PackedBatch, outputs: Outputs) -> Tensor:
            targets = work.target(number)
            assert targets is not None and targets.values is not None and outputs.values is not None
            of_tokens, clipped = clipped_value_loss(
                outputs.values, targets.values, targets.returns, self.settings.value_clip
            )
            value = weighted_sum(of_tokens, batch.weights)
            terms = {
                "value_loss": value, "clipped": weighted_sum(clipped, batch.weights), "weight": batch.weights.sum(),
            }  # fmt: skip
            for name, term in terms.items():
                sums[name] = sums.get(name, torch.zeros((), device=term.device)) + term.detach().double()
            return value

        with self.ranks.leaving_on_error():
            self.critic.forward_backward(work.batches, loss)
        try:
            norm, lr = self.critic.optimizer_step()
        except NonFiniteGradient as error:
            named = NonFiniteGradient(error.update, error.norm, error.parameters, "of the critic")
            if not self.settings.skip_nonfinite_updates:
                raise named from None
            log.warning("skipped %s", named)
            return None
        rank_sums = {name: float(value) for name, value in sums.items()} if self.critic.leads_replica else {}
        totals = self.ranks.add_numbers(rank_sums)
        weight = totals.get("weight", 0.0)
        return {
            "value_loss": totals.get("value_loss", 0.0),
            "value_clipfrac": totals.get("clipped", 0.0) / weight if weight else 0.0,
            "grad_norm": norm,
            "lr-pg_0": lr,
        }

    def _explained_variance(self, updates: list[Work]) -> float:
        """1 - Var(R - V) / Var(R) over all trained tokens, with the values before the updates; 0 if all R are equal.

        1 is a perfect critic, 0 one that is no better than a constant.
        """
        sums = {name: 0.0 for name in ("count", "returns", "returns squared", "errors", "errors squared")}
        for work in updates if self.critic.leads_replica else ():
            for batch, targets in work.pairs():
                assert targets.values is not None
                trained = batch.mask > 0
                returns = targets.returns[trained].double()
                errors = returns - targets.values[trained].double()
                sums["count"] += len(returns)
                for name, numbers in (("returns", returns), ("errors", errors)):
                    sums[name] += float(numbers.sum())
                    sums[f"{name} squared"] += float(numbers.square().sum())
        totals = self.ranks.add_numbers(sums)
        count = totals["count"]
        if not count:
            return 0.0
        variance, left = (
            totals[f"{name} squared"] / count - (totals[name] / count) ** 2 for name in ("returns", "errors")
        )
        # Rounding leaves a little of the variance of equal numbers.
        return 1.0 - left / variance if variance > 1e-12 * totals["returns squared"] / count else 0.0
