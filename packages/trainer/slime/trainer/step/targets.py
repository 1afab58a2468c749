"""Training targets of an iteration, set before its first update: log-probs, and advantages as plug-ins change them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from slime.trainer.algorithms.advantages import whiten
from slime.trainer.algorithms.estimators import Rewards, find_estimator
from slime.trainer.algorithms.kl import approximate_kl
from slime.trainer.backends.base import POLICY, REFERENCE, TEACHER, Backend, Outputs
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step import rollout_data
from slime.trainer.step.loss import Targets
from slime.trainer.step.micro_batches import MicroBatches
from slime.trainer.step.old_policies import OldPolicies, token_versions, trained_versions
from slime.types.plugins import load_setting
from slime.types.sample import Sample

Batches: TypeAlias = "MicroBatches | list[PackedBatch | None]"


@dataclasses.dataclass
class Work:
    """This rank's micro-batches of an update and their targets; None where the rank has no samples.

    scored: the same samples in the micro-batches of passes that only compute log-probs, often `batches` itself.
    samples: by position. prepare: makes the targets of a micro-batch that has none yet, by its number; it gets this
    object as an argument, because one that refers to it would keep all samples until a collection of garbage.
    """

    batches: Batches
    targets: list[Targets | None]
    scored: Batches
    samples: dict[int, Sample]
    prepare: Callable[[Work, int], Targets | None] | None = None

    def target(self, number: int) -> Targets | None:
        """Returns the targets of a micro-batch."""
        if self.targets[number] is None and self.prepare is not None:
            self.targets[number] = self.prepare(self, number)
        return self.targets[number]

    def pairs(self) -> Iterator[tuple[PackedBatch, Targets]]:
        for number, batch in enumerate(self.batches):
            targets = self.target(number)
            if batch is not None and targets is not None:
                yield batch, targets


# Work -> [K] of each of its micro-batches.
Values: TypeAlias = Callable[[Work], list[Tensor | None]]


class Preparation:
    """Sets the targets of iterations. Every method is collective."""

    def __init__(
        self, settings: TrainerSettings, backend: Backend, ranks: Ranks, args: Any, values: Values | None = None
    ) -> None:
        """args: what plug-ins receive. values: of a critic, where there is one."""
        self.settings = settings
        self.backend = backend
        self.ranks = ranks
        self.args = args
        self._values = values
        self._estimator = find_estimator(settings.advantage_estimator)
        # With --keep-old-actor the trainer sets it.
        self.old_policies: OldPolicies | None = None
        self._advantages = load_setting(settings, "custom_advantage_function_path")
        self._postprocess = load_setting(settings, "rollout_data_postprocess_path")

    def run(self, rollout: int, updates: list[Work]) -> dict[str, float]:
        """Sets the targets of every micro-batch of every update, before the first of them changes the policy.

        Targets that depend on their own micro-batch alone are made when it is trained. Returns metrics.
        """
        if not self.settings.compute_advantages_and_returns:
            return {}
        if self._are_alone(len(updates)):
            for number, work in enumerate(updates):
                work.prepare = functools.partial(self._alone, moved=number > 0)
            return {}
        metrics = self._score_all(updates)
        self.ranks.together(lambda: self._estimate_all(updates))
        pairs = [pair for work in updates for pair in work.pairs()]
        if self.settings.use_opd:
            metrics |= self._distil(pairs)
        if self.settings.normalize_advantages:
            self._whiten(pairs)
        if self._postprocess is not None:
            postprocess = self._postprocess
            self.ranks.together(lambda: rollout_data.postprocess(postprocess, self.args, rollout, updates))
        return metrics

    def _are_alone(self, updates: int) -> bool:
        """Tells whether the targets of a micro-batch need no forward pass, no plug-in and no other micro-batch."""
        s = self.settings
        passes = self._needs_old_log_probs(updates) or s.needs_reference or s.keep_old_actor or s.use_rollout_entropy
        plugins = self._advantages is not None or self._postprocess is not None
        return not (passes or plugins or s.use_opd or s.normalize_advantages or self._values is not None)

    def _alone(self, work: Work, number: int, *, moved: bool) -> Targets | None:
        batch, none = work.batches[number], torch.empty(0)
        if batch is None:
            return None
        old = _of_engine(batch) if self.settings.use_rollout_logprobs else None
        targets = Targets(advantages=none, returns=none, old_log_probs=old, ref_log_probs=None, moved=moved)
        self._estimate(batch, targets, work.samples)
        return targets

    def _needs_old_log_probs(self, updates: int) -> bool:
        """Returns False if the policy at the start of the update is the old policy: `log_probs.detach()` of the update
        are the same numbers."""
        s = self.settings
        if s.loss_type == "sft_loss":
            return False
        if s.use_rollout_logprobs:
            return s.get_mismatch_metrics and updates > 1
        plugins = self._advantages is not None or self._postprocess is not None
        # A pass that trains replays the experts of this one.
        return updates > 1 or s.kl_coef != 0 or s.use_opd or plugins or s.use_routing_replay

    def _score_all(self, updates: list[Work]) -> dict[str, float]:
        s = self.settings
        names: dict[str, str] = {}
        metrics: dict[str, float] = {}
        if s.keep_old_actor:
            names, metrics = self._old_names(updates)
        stale = any(name != POLICY for name in names.values())
        needed = self._needs_old_log_probs(len(updates)) or stale
        sums = {"entropy": 0.0, "weight": 0.0}
        for number, work in enumerate(updates):
            policy_outputs: list[Outputs | None] = [None] * len(work.batches)
            if s.use_rollout_entropy or (needed and (not stale or POLICY in names.values())):
                policy_outputs = self._scores(work, POLICY, entropy=s.use_rollout_entropy)
            trained = [None if f is None else f.log_probs for f in policy_outputs]
            old = self._old_log_probs(work, names, trained) if stale else trained
            nothing: list[Outputs | None] = [None] * len(work.batches)
            ref = self._scores(work, REFERENCE) if s.needs_reference else nothing
            teacher = self._teacher_log_probs(work)
            values = self._values(work) if self._values is not None else [None] * len(work.batches)
            for i, batch in enumerate(work.batches):
                if batch is None:
                    continue
                of_reference, outputs = ref[i], policy_outputs[i]
                work.targets[i] = targets = Targets(
                    advantages=torch.empty(0),
                    returns=torch.empty(0),
                    old_log_probs=_of_engine(batch) if s.use_rollout_logprobs else old[i] if needed else None,
                    ref_log_probs=None if of_reference is None else of_reference.log_probs,
                    train_log_probs=trained[i] if s.use_rollout_logprobs else None,
                    moved=number > 0,
                    entropy=None if outputs is None else outputs.entropy,
                    values=values[i],
                    teacher_log_probs=teacher[i],
                )
                if targets.entropy is not None and self.backend.leads_replica:
                    sums["entropy"] += float((targets.entropy * batch.weights).sum())
                    sums["weight"] += float(batch.weights.sum())
        if s.use_rollout_entropy:
            totals = self.ranks.add_numbers(sums)
            metrics["rollout/entropy"] = totals["entropy"] / totals["weight"] if totals["weight"] else 0.0
        return metrics

    def _scores(self, work: Work, of: str, *, entropy: bool = False) -> list[Outputs | None]:
        """Returns scores of `work.batches`, in whatever micro-batches they are computed."""
        found = self.backend.scores(work.scored, of=of, entropy=entropy)
        if work.scored is work.batches:
            return found
        parts: dict[int, tuple[Tensor, Tensor | None]] = {}
        for batch, outputs in zip(work.scored, found, strict=True):
            if batch is not None and outputs is not None:
                entropies = outputs.entropy.split(batch.lengths) if outputs.entropy is not None else ()
                for i, part in enumerate(outputs.log_probs.split(batch.lengths)):
                    parts[batch.positions[i]] = part, entropies[i] if entropies else None
        arranged: list[Outputs | None] = []
        for batch in work.batches:
            if batch is None:
                arranged.append(None)
                continue
            of_batch = [parts[position] for position in batch.positions]
            whole = torch.cat([e for _, e in of_batch if e is not None]) if entropy else None
            arranged.append(Outputs(torch.cat([p for p, _ in of_batch]), whole))
        return arranged

    def _old_names(self, updates: list[Work]) -> tuple[dict[str, str], dict[str, float]]:
        """(version -> name of its weights, or the policy's if they are gone; metrics), the same on every rank."""
        assert self.old_policies is not None
        local_versions = trained_versions(sample for work in updates for sample in work.samples.values())
        versions = sorted({version for of_rank in self.ranks.gather(sorted(local_versions)) for version in of_rank})
        found = {version: self.old_policies.find(version) for version in versions}
        missing = sum(name is None for name in found.values())
        return {v: POLICY if name is None else name for v, name in found.items()}, {
            "train/old_policies": float(len(versions)),
            "train/old_policies_missing": float(missing),
        }

    def _old_log_probs(self, work: Work, names: dict[str, str], policy: list[Tensor | None]) -> list[Tensor | None]:
        """Returns log-probs by the weights that generated each token. policy: by the weights that train now."""
        old = [None if batch is None else torch.zeros_like(batch.mask) for batch in work.batches]
        for name in sorted(set(names.values())):
            found = policy
            if name != POLICY:
                found = [None if o is None else o.log_probs for o in self._scores(work, name)]
            for i, batch in enumerate(work.batches):
                values, into = found[i], old[i]
                if batch is not None and values is not None and into is not None:
                    from_these_weights = [
                        names.get(str(version), POLICY) == name
                        for position in batch.positions
                        for version in token_versions(work.samples[position])
                    ]
                    old[i] = torch.where(torch.tensor(from_these_weights, device=values.device), values, into)
        return old

    def old_versions(self, updates: list[Work]) -> list[str]:
        """Returns the weight versions of the trained tokens of all ranks."""
        local_versions = sorted(trained_versions(sample for work in updates for sample in work.samples.values()))
        return sorted({version for of_rank in self.ranks.gather(local_versions) for version in of_rank})

    def _estimate_all(self, updates: list[Work]) -> None:
        for work in updates:
            for batch, targets in work.pairs():
                self._estimate(batch, targets, work.samples)

    def _estimate(self, batch: PackedBatch, targets: Targets, samples: Mapping[int, Sample]) -> None:
        """Sets advantages, before whitening, and returns."""
        s = self.settings
        kl = torch.zeros_like(batch.mask)
        if s.kl_coef:
            assert targets.old_log_probs is not None and targets.ref_log_probs is not None
            kl = approximate_kl(targets.old_log_probs, targets.ref_log_probs, s.kl_loss_type)
        if self._advantages is not None:
            of_batch = [samples[position] for position in batch.positions]
            path = s.custom_advantage_function_path
            rollout_data.set_advantages(self._advantages, self.args, path, batch, targets, of_batch, kl)
            return
        targets.advantages = self._estimator.advantages(
            Rewards(
                batch.rewards, kl, batch.mask, batch.lengths, kl_coef=s.kl_coef, gamma=s.gamma, lambd=s.lambd,
                values=targets.values,
            )
        )  # fmt: skip
        targets.returns = targets.advantages if targets.values is None else targets.advantages + targets.values

    def _teacher_log_probs(self, work: Work) -> list[Tensor | None]:
        """[K] of each micro-batch; None without distillation."""
        if self.settings.loads_teacher:
            return [None if outputs is None else outputs.log_probs for outputs in self._scores(work, TEACHER)]
        if not self.settings.use_opd:
            return [None] * len(work.batches)
        return [
            None
            if batch is None
            else torch.cat([_of_teacher(work.samples[position]).to(batch.mask) for position in batch.positions])
            for batch in work.batches
        ]

    def _distil(self, pairs: list[tuple[PackedBatch, Targets]]) -> dict[str, float]:
        """Subtracts the weighted difference to the teacher from the advantages; returns its mean over tokens.

        A_t - opd_kl_coef * (log p(policy) - log p(teacher)): the expectation of the difference under the policy is the
        reverse KL divergence (Lu et al., "On-Policy Distillation", 2025).
        """
        sums = {"difference": 0.0, "weight": 0.0}
        for batch, targets in pairs:
            assert targets.old_log_probs is not None and targets.teacher_log_probs is not None
            difference = (targets.old_log_probs - targets.teacher_log_probs).where(batch.mask != 0, 0.0)
            targets.advantages = targets.advantages - self.settings.opd_kl_coef * difference
            if self.backend.leads_replica:
                sums["difference"] += float((difference * batch.weights).sum())
                sums["weight"] += float(batch.weights.sum())
        totals = self.ranks.add_numbers(sums)
        return {"train/opd_reverse_kl": totals["difference"] / totals["weight"] if totals["weight"] else 0.0}

    def _whiten(self, pairs: list[tuple[PackedBatch, Targets]]) -> None:
        none = torch.zeros(0, device=self.backend.device)
        values = torch.cat([none, *(t.advantages for _, t in pairs)])
        whitened = whiten(values, torch.cat([none, *(b.mask for b, _ in pairs)]), self._add)
        for (_, targets), part in zip(pairs, whitened.split([len(b.mask) for b, _ in pairs]), strict=True):
            targets.advantages = part

    def _add(self, values: Tensor) -> Tensor:
        """Returns the sum over replicas, on every rank."""
        return self.ranks.add(values if self.backend.leads_replica else torch.zeros_like(values))


def _of_engine(batch: PackedBatch) -> Tensor:
    """[K]; 0 where the loss mask is, as all log-probs of a policy: a sample that trains nothing may have none."""
    found = batch.rollout_log_probs
    return torch.zeros_like(batch.mask) if found is None else found.where(batch.mask != 0, 0.0)


def _of_teacher(sample: Sample) -> Tensor:
    """[R]; zeros for a sample that has none, which trains nothing."""
    found = sample.array("teacher_log_probs")
    return torch.zeros(sample.response_length) if found is None else torch.as_tensor(found)
