"""The loss of a packed row: the scalar that is minimised, and the sums that become metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime.trainer.algorithms.aggregation import weighted_sum
from slime.trainer.algorithms.estimators import PolicyTerms, constant_ratio, find_estimator
from slime.trainer.algorithms.importance import importance_weights
from slime.trainer.algorithms.kl import approximate_kl
from slime.trainer.algorithms.policy_loss import off_policy_weights, sequence_mean
from slime.trainer.algorithms.ratio import probability_ratio
from slime.trainer.backends.base import Outputs
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.settings.trainer import TrainerSettings, flat_args
from slime.trainer.step.custom_loss import CustomLoss
from slime.types.errors import PluginError
from slime.types.plugins import load_setting
from slime.types.sample import Sample

Sums = dict[str, Any]
TIS_FLAG = "--custom-tis-function-path"
REDUCER_FLAG = "--custom-pg-loss-reducer-function-path"

# Sums over the whole update's weights: the terms of the loss. All others are means.
LOSS_TERMS = frozenset({"loss", "pg_loss", "kl_loss"})
MISMATCH = "train_rollout_logprob_abs_diff"
# Sums of weights that means are divided by: of all tokens that were fed, of the tokens in samples that add a gradient,
# and of the tokens among these that have log-probs of the engine.
_FED, _TRAINED, _COMPARED = "weight fed", "weight trained", "weight compared"


@dataclasses.dataclass
class Targets:
    """Targets of a packed row; all [K] float32, fixed while the update runs."""

    advantages: Tensor
    # None: the policy itself, which is exact in the first update since the samples were generated.
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    # Advantages before whitening.
    returns: Tensor
    # The policy's before the iteration's first update, if `old_log_probs` are the engine's and these were computed.
    train_log_probs: Tensor | None = None
    # True if the policy has been updated since these targets were set.
    moved: bool = False
    entropy: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    # The critic's, before the iteration's first update.
    values: Tensor | None = None


class Loss:
    """The loss of one trainer, with the plug-ins that its settings name loaded and checked."""

    def __init__(self, settings: TrainerSettings, extra_args: dict[str, Any] | None = None) -> None:
        self.settings = settings
        self.args = flat_args(settings, extra_args)
        self._estimator = find_estimator(settings.advantage_estimator)
        self._tis = load_setting(settings, "custom_tis_function_path")
        self._reducer = load_setting(settings, "custom_pg_loss_reducer_function_path")
        self._custom = CustomLoss(settings, self.args) if settings.loss_type == "custom_loss" else None

        # A sample without advantage is never clipped, so these are known for samples that were skipped, too. A constant
        # ratio is clipped whatever the advantage is.
        self._over_all = {"opsm_clipfrac"} if settings.use_opsm else set()
        if self._estimator.loss is not constant_ratio:
            self._over_all.add("pg_clipfrac")

    @property
    def entropy(self) -> str:
        """Kind of entropies that the loss needs: see `Backend.forward_backward`."""
        if self.settings.loss_type == "sft_loss":
            return "none"
        without_gradient = "value" if self.settings.loss_type == "policy_loss" else "none"
        return "gradient" if self.settings.entropy_coef else without_gradient

    @property
    def logits(self) -> bool:
        """True if the loss needs logits."""
        return self._custom is not None and self._custom.takes_logits

    def __call__(
        self,
        batch: PackedBatch,
        outputs: Outputs,
        targets: Targets | None,
        samples: Sequence[Sample],
        denominator: float,
        sums: Sums,
    ) -> Tensor:
        """Returns the loss of one row, and adds its metrics to `sums`.

        samples: of the row. denominator: trajectories of the update, or its tokens with per-token loss; for functions
        of the user.
        """
        if self.settings.loss_type == "sft_loss":
            loss = weighted_sum(-outputs.log_probs, batch.weights)
            return _add(sums, {"loss": loss}, loss)
        if self._custom is not None:
            loss, metrics = self._custom(batch, outputs, targets, samples, denominator)
            return _add(sums, metrics | {"loss": loss}, loss)
        assert targets is not None
        return self._policy_loss(batch, outputs, targets, denominator, sums)

    def metrics(self, totals: dict[str, float], skipped_weight: float) -> dict[str, float]:
        """Returns the metrics of one update from the sums of all its rows.

        skipped_weight: weight of the tokens that took no forward pass. Metrics that need them are left out even where
        they are fed, so no number depends on which samples are skipped.
        """
        if self.settings.loss_type != "policy_loss":
            return {"loss": 0.0} | totals
        metrics = {"loss": 0.0, "pg_loss": 0.0} | dict.fromkeys(self._over_all, 0.0)
        for name, total in totals.items():
            if name in LOSS_TERMS:
                metrics[name] = total
            elif name not in (_FED, _TRAINED, _COMPARED):
                weight = totals[_COMPARED if name == MISMATCH else _TRAINED]
                if name in self._over_all:
                    weight = totals[_FED] + skipped_weight
                if weight:
                    metrics[name] = total / weight
        return metrics

    def _policy_loss(
        self, batch: PackedBatch, outputs: Outputs, targets: Targets, denominator: float, sums: Sums
    ) -> Tensor:
        s = self.settings
        log_probs, advantages = outputs.log_probs, targets.advantages
        old = log_probs.detach() if targets.old_log_probs is None else targets.old_log_probs
        before = old if not s.use_rollout_logprobs else targets.train_log_probs
        if before is None and not targets.moved:
            before = log_probs.detach()
        ppo_kl = old - log_probs
        tokens: dict[str, Tensor] = {"ppo_kl": ppo_kl}
        pg_loss, clipped = self._estimator.loss(PolicyTerms(
            ppo_kl, log_probs, advantages, s.eps_clip, s.eps_clip_high, s.eps_clip_c,
            lambda values: sequence_mean(values, batch.mask, batch.segments, batch.num_samples),
        ))  # fmt: skip
        tokens["pg_clipfrac"] = clipped
        if s.use_opsm:
            kept = off_policy_weights(
                old - log_probs, advantages, batch.mask, batch.segments, batch.num_samples, s.opsm_delta
            )
            pg_loss = pg_loss * kept
            tokens["opsm_clipfrac"] = 1 - kept
        weights, mask = batch.weights, batch.mask
        # Where no sample of the row has log-probs of the engine, none of its tokens train.
        if (s.use_tis or s.get_mismatch_metrics) and batch.rollout_log_probs is not None:
            assert before is not None
            corrected, corrected_mask, metrics = self._correct_mismatch(batch, pg_loss, before)
            tokens |= metrics
            if s.use_tis:
                # Changed masks change the numerator only: the weights keep the plan's denominators.
                pg_loss, weights, mask = corrected, weights * corrected_mask, corrected_mask
        if self._reducer is None:
            pg = weighted_sum(pg_loss, weights)
        else:
            masks = list(mask.split(batch.lengths))
            reduce = self._reducer(batch.total_lengths, batch.lengths, masks, s.calculate_per_token_loss)
            pg = _reduced(reduce(pg_loss), s.custom_pg_loss_reducer_function_path) / denominator
        loss, terms = pg, {"pg_loss": pg}
        if outputs.entropy is not None:
            tokens["entropy_loss"] = outputs.entropy
            if s.entropy_coef:
                loss = loss - s.entropy_coef * weighted_sum(outputs.entropy, batch.weights)
        if s.use_kl_loss:
            assert targets.ref_log_probs is not None
            ratio = probability_ratio(log_probs - old) if s.use_unbiased_kl else None
            kl = weighted_sum(approximate_kl(log_probs, targets.ref_log_probs, s.kl_loss_type, ratio), batch.weights)
            terms["kl_loss"] = kl
            loss = loss + s.kl_loss_coef * kl
        trained = batch.weights
        if s.advantages_alone_train:
            trained = trained * _of_samples(advantages != 0, batch)
        for name, values in tokens.items():
            terms[name] = weighted_sum(values.detach(), batch.weights if name in self._over_all else trained)
        terms |= {_FED: batch.weights.sum(), _TRAINED: trained.sum()}
        if batch.rollout_log_probs is not None and before is not None:
            compared = trained * ~batch.rollout_log_probs.isnan()
            terms[MISMATCH] = weighted_sum((before - batch.rollout_log_probs).abs(), compared)
            terms[_COMPARED] = compared.sum()
        return _add(sums, {"loss": loss, **terms}, loss)

    def _correct_mismatch(
        self, batch: PackedBatch, pg_loss: Tensor, old: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(loss [K], the masks that the function returned [K], metrics [K])."""
        s = self.settings
        assert batch.rollout_log_probs is not None
        if self._tis is None:
            weights, metrics = importance_weights(
                old, batch.rollout_log_probs, batch.mask, batch.segments, batch.num_samples,
                mode=s.tis_mode, low=s.tis_clip_low, high=s.tis_clip,
            )  # fmt: skip
            return pg_loss * weights, batch.mask, metrics
        lengths, of_engine = batch.lengths, batch.rollout_log_probs
        # A sample that trains nothing may have none, and a function may multiply by the mask: NaN would stay.
        of_engine = torch.where(of_engine.isnan() & (batch.mask == 0), old, of_engine)
        answer = self._tis(
            args=self.args, pg_loss=pg_loss, train_log_probs=list(old.split(lengths)),
            rollout_log_probs=list(of_engine.split(lengths)), loss_masks=list(batch.mask.split(lengths)),
            total_lengths=batch.total_lengths, response_lengths=lengths,
        )  # fmt: skip
        return _corrected(answer, s.custom_tis_function_path, batch.mask)


def _corrected(answer: Any, path: str | None, mask: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Reads (loss [K], loss masks of samples, metrics: [K] or one number each). Raises PluginError for another form,
    which torch would broadcast."""

    def fits(what: str, values: Any, *shapes: torch.Size) -> Tensor:
        tensor = torch.as_tensor(values, device=mask.device)
        if tensor.shape not in shapes:
            raise _plugin_error(TIS_FLAG, path, f"{what} shape {list(tensor.shape)}", str(list(mask.shape)))
        return tensor

    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        got = f"{type(answer).__name__} of {len(answer)}" if hasattr(answer, "__len__") else type(answer).__name__
        expected = "a tuple of 3: pg_loss, loss masks and metrics"
        raise _plugin_error(TIS_FLAG, path, f"it returned a {got}", expected)
    pg_loss, masks, metrics = answer
    loss = fits("its pg_loss has", pg_loss, mask.shape)
    changed = fits("its loss masks have", torch.cat(list(masks)), mask.shape)
    one = torch.Size()
    of_tokens = {name: fits(f"its metric {name!r} has", values, mask.shape, one) for name, values in metrics.items()}
    return loss, changed.to(mask), {name: values.to(mask).expand_as(mask) for name, values in of_tokens.items()}


def _reduced(loss: Any, path: str | None) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise _plugin_error(REDUCER_FLAG, path, f"its reduction is {got}", "a tensor of one number")
    return loss.reshape(())


def _plugin_error(flag: str, path: str | None, problem: str, expected: str) -> PluginError:
    return PluginError(f"{flag} {path}: {problem}, expected {expected}", field=flag, value=path, expected=expected)


def _of_samples(tokens: Tensor, batch: PackedBatch) -> Tensor:
    """[K] bool: whether any token of the sample is true."""
    counts = batch.mask.new_zeros(batch.num_samples).index_add(0, batch.segments, tokens.to(batch.mask))
    return (counts > 0)[batch.segments]


def _add(sums: Sums, terms: dict[str, Any], loss: Tensor) -> Tensor:
    # Kept on the device: reading a number would make the host wait in every micro-batch.
    for name, value in terms.items():
        sums[name] = sums.get(name, 0.0) + value.detach().double()
    return loss
