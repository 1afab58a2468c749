"""Trains an iteration on one rank: samples, log-probs, advantages, optimizer updates, metrics. It knows no service."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from slime.trainer.backends.base import Backend, NonFiniteGradient, Outputs
from slime.trainer.backends.learning_rate import learning_rate
from slime.trainer.batching.nuclei import check_nuclei, refuse_nuclei
from slime.trainer.batching.packing import (
    PackedBatch,
    check_experts,
    check_ids,
    check_sample,
    check_teacher,
    loss_mask,
    pack,
)
from slime.trainer.batching.plan import assign, lengths_of
from slime.trainer.batching.schedule import Lengths, MicroBatch, regroup
from slime.trainer.batching.trunks import Prefixes
from slime.trainer.debug.profiler import Profiler
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.checks import refuse_nuclei_without_gradient
from slime.trainer.settings.trainer import TrainerSettings, flat_args
from slime.trainer.step.common_turns import compare
from slime.trainer.step.critic import CriticStep
from slime.trainer.step.dump import write_train_data
from slime.trainer.step.loss import Loss, Sums
from slime.trainer.step.micro_batches import MicroBatches
from slime.trainer.step.nonfinite import find_cause
from slime.trainer.step.sharing import ReadSamples, ReplicaReader
from slime.trainer.step.targets import Preparation, Work
from slime.types.errors import InvalidField
from slime.types.sample import Sample

log = logging.getLogger(__name__)
# Above this many times the tokens that shared prompts leave to compute, a run is told so.
MUCH_REPEATED = 1.25


class TrainStep:
    """Runs steps of one trainer; `run` is collective. each_reads: see ReplicaReader.

    before_passes: called when the samples have been read. before_update: called before each use of the optimizer's
    state, which only updates read.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        backend: Backend,
        ranks: Ranks,
        extra_args: dict[str, Any] | None = None,
        *,
        each_reads: bool = False,
        critic: Backend | None = None,
        before_passes: Callable[[], None] = lambda: None,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self._before_passes = before_passes
        self._before_update = before_update
        self.backend = backend
        self.ranks = ranks
        self.loss = Loss(settings, extra_args)
        self._reader = ReplicaReader(ranks, backend, each_reads=each_reads)
        self.args = flat_args(settings, extra_args)
        self._critic = critic
        self.critic = None if critic is None else CriticStep(settings, critic, ranks)
        # Rows are laid out once, for the policy and the critic.
        self._gathers_keys = backend.gathers_keys or (critic is not None and critic.gathers_keys)
        values = None if self.critic is None else self.critic.values
        self.preparation = Preparation(settings, backend, ranks, self.args, values)
        self._profiler = Profiler(settings, self.args, ranks.rank)
        # From the last run, by position of the sample: float32 [response tokens], NaN for masked tokens.
        self.log_probs: dict[int, np.ndarray] = {}
        self._scored: dict[int, torch.Tensor] = {}
        self._advised = False

    def run(self, plan: dict[str, Any], read: ReadSamples, positions: Set[int] = frozenset()) -> dict[str, float]:
        """Trains on the step that `plan` describes. Metrics "train/..." and "perf/..." are those of all ranks.

        Sets `log_probs` to those of the samples at `positions`, as far as this rank leads the replica that has them.
        """
        self._scored.clear()
        if self.backend.routing is not None:
            self.backend.routing.begin_iteration()
        clock, step = _Clock(), plan["step"]
        with clock.measure("perf/train_time"), self._profiler.trace("train_overall", step):
            with clock.measure("perf/train_data_time"):
                updates = self._read(plan, read)
                self._before_passes()
            if self.settings.reset_optimizer_states:
                self._before_update()
                self.backend.reset_optimizer()
            with clock.measure("perf/log_probs_time"), self._profiler.trace("train_log_probs", step):
                prepared = self.preparation.run(step, updates)
            if self.settings.save_debug_train_data is not None:
                path = self.settings.save_debug_train_data
                self.ranks.together(lambda: write_train_data(path, step, self.ranks.rank, updates))
            if self.critic is not None:
                with clock.measure("perf/critic_train_time"):
                    prepared |= self.critic.train(updates)
            results = []
            trains_policy = self.critic is None or step >= self.settings.num_critic_only_steps
            with clock.measure("perf/actor_train_time"), self._profiler.trace("train_actor", step):
                for number, work in enumerate(updates if trains_policy else ()):
                    self.backend.begin_update(step, number)
                    results.append(self._update(plan["updates"][number], work, positions))
        self.log_probs = {position: values.cpu().numpy() for position, values in self._scored.items()}
        self._scored.clear()
        if self.preparation.old_policies is not None:
            self.preparation.old_policies.trained(self.preparation.old_versions(updates))
        trained_updates = [result for result in results if result is not None]
        metrics = _averaged(trained_updates) | prepared
        rates = [result["train/lr-pg_0"] for result in trained_updates]
        metrics["train/lr-pg_0"] = rates[-1] if rates else learning_rate(self.settings, self.backend.updates)
        if self.settings.skip_nonfinite_updates:
            metrics["train/nonfinite_updates"] = len(results) - len(trained_updates)
        metrics["train/step"] = self.backend.updates
        metrics["train/skipped_samples"] = sum(len(update["skipped"]) for update in plan["updates"])
        metrics["train/dropped_samples"] = len(plan["dropped"])
        metrics["train/micro_batches"] = sum(len(work.batches) for work in updates)
        rows = [batch for work in updates for batch in work.batches if batch is not None]
        metrics["perf/row_tokens"] = sum(batch.tokens.shape[1] for batch in rows)
        metrics |= clock.seconds
        tokens = sum(plan["lengths"][i] for update in plan["updates"] for i in update["train"])
        metrics["perf/actor_train_tokens_per_second"] = tokens / max(clock.seconds["perf/actor_train_time"], 1e-9)
        return metrics

    @property
    def _shares_prompts(self) -> bool:
        return self.backend.can_share_prompts and (self._critic is None or self._critic.can_share_prompts)

    def _read(self, plan: dict[str, Any], read: ReadSamples) -> list[Work]:
        """Reads this replica's share of every update; one rank alone packs a micro-batch when it is computed."""
        backend = self.backend
        lengths, prefixes = lengths_of(plan, share_prompts=self._shares_prompts), None
        assigned = first = self._assign(plan, lengths)
        samples = self._samples(read, assigned, {})
        if lengths.prompts:
            # The prompts of a group are mostly equal; only the rank that has read them knows whether they are.
            equal, prefixes = compare(plan, lengths, samples, backend, self.ranks)
            if equal is not lengths:
                lengths, assigned = equal, self._assign(plan, equal)
            longer = prefixes.lengthen(lengths) if prefixes is not None else None
            if prefixes is not None and longer is not None:
                other, cost = self._assign(plan, longer), functools.partial(prefixes.cost, lengths=lengths)
                if other.rows <= assigned.rows and other.tokens(cost) < assigned.tokens(cost):
                    lengths, assigned = longer, other
            if assigned is not first:
                samples = self._samples(read, assigned, samples)
            self._advise(lengths, assigned.shares)
        # Looking for equal prompts takes time for every sample.
        share = prefixes is not None or bool(lengths.shared())
        return self.ranks.together(lambda: self._pack(plan, assigned, samples, prefixes, share=share))

    def _advise(self, lengths: Lengths, shares: list[list[MicroBatch]]) -> None:
        """Says once how much is computed again because micro-batches of a fixed size part the samples of a prompt."""
        if self._advised or self.settings.use_dynamic_batch_size or self.ranks.rank:
            return
        computed = sum(lengths.cost(batch) for update in shares for batch in update)
        needed = sum(lengths.cost([position for batch in update for position in batch]) for update in shares)
        # A step whose samples are all skipped computes nothing, and says nothing of later steps.
        self._advised = needed > 0
        if computed > MUCH_REPEATED * needed:
            log.warning(
                "--micro-batch-size %d: %.1f times the tokens that are needed, with a prompt for each sample. "
                "--use-dynamic-batch-size with --max-tokens-per-gpu computes a prompt once for its group",
                self.settings.micro_batch_size, computed / needed,
            )  # fmt: skip

    def _assign(self, plan: dict[str, Any], lengths: Lengths) -> _Assigned:
        backend, limit = self.backend, self.settings.log_probs_max_tokens_per_gpu
        updates, scored = [], []
        for number in range(len(plan["updates"])):
            every = assign(
                plan, number, backend.replicas, self.settings, backend.hidden_size, backend.micro_batch_multiple,
                lengths,
            )  # fmt: skip
            updates.append(every)
            if limit is not None:
                scored.append(regroup(every, lengths, limit, backend.micro_batch_multiple)[backend.replica])
        return _Assigned(updates, [every[backend.replica] for every in updates], scored)

    def _samples(self, read: ReadSamples, assigned: _Assigned, known: Mapping[int, Sample]) -> dict[int, Sample]:
        """Returns the samples of this replica's micro-batches, and reads those that are not `known`. Collective."""
        positions = [p for share in assigned.shares for micro_batch in share for p in micro_batch]
        missing = [p for p in positions if p not in known]
        found = {**known, **dict(zip(missing, self._reader.read(read, missing), strict=True))}
        return {p: found[p] for p in positions}

    def _pack(
        self,
        plan: dict[str, Any],
        assigned: _Assigned,
        samples: dict[int, Sample],
        prefixes: Prefixes | None,
        *,
        share: bool,
    ) -> list[Work]:
        s = self.settings
        needs_log_probs = s.reads_rollout_log_probs
        refuse_nuclei_without_gradient(s)
        check_ids([*samples.values()], self.backend.vocab_size)
        for position, sample in samples.items():
            check_sample(sample, needs_log_probs=needs_log_probs, vision=self.backend.vision)
            if s.use_opd and not s.loads_teacher:
                check_teacher(sample)
            if s.samples_from_nuclei:
                check_nuclei(sample, loss_mask(sample), self.backend.vocab_size)
            elif sample.rollout_top_p_token_ids is not None:
                refuse_nuclei(sample, loss_mask(sample))
            if self.backend.replayed_experts is not None:
                check_experts(sample, *self.backend.replayed_experts)
            found, expected = len(sample.array("tokens")), plan["lengths"][position]
            if found != expected:
                raise InvalidField("tokens", found, f"{expected} tokens, as planned (position {position})")
        works = []
        pack_one = functools.partial(self._pack_one, plan, samples=samples, prefixes=prefixes, share=share)
        for number, micro_batches in enumerate(assigned.shares):
            batches = passes = MicroBatches([functools.partial(pack_one, each) for each in micro_batches])
            if assigned.scored and s.compute_advantages_and_returns:
                passes = MicroBatches([functools.partial(pack_one, each) for each in assigned.scored[number]])
            if self.ranks.world_size > 1:
                # An error of one rank is told to the others here, and not while they wait for its passes.
                batches.pack_all()
                passes.pack_all()
            of_update = {p: samples[p] for micro_batch in micro_batches for p in micro_batch}
            works.append(Work(batches, [None] * len(batches), passes, of_update))
        return works

    def _pack_one(
        self,
        plan: dict[str, Any],
        positions: MicroBatch,
        *,
        samples: dict[int, Sample],
        prefixes: Prefixes | None,
        share: bool,
    ) -> PackedBatch | None:
        if not positions:
            return None
        trunks = prefixes.trunks(positions) if prefixes is not None else {}
        return pack(
            [samples[p] for p in positions],
            positions,
            [plan["rewards"][p] for p in positions],
            [plan["weights"][p] for p in positions],
            share_prompts=share,
            trunks=[trunks.get(p) for p in positions],
            gather=self._gathers_keys,
            multiple=self.backend.row_multiple,
            vision=self.backend.vision,
            experts=self.backend.replayed_experts and self.backend.replayed_experts[:2],
            nuclei=self.settings.samples_from_nuclei,
            device=self.backend.device,
        )

    def _update(self, update: dict[str, Any], work: Work, positions: Set[int]) -> dict[str, float] | None:
        """Makes one optimizer update and returns its metrics; None where it was skipped: its gradient is not finite."""
        sums: Sums = {}
        denominator = update["num_tokens"] if self.settings.calculate_per_token_loss else update["num_rollouts"]

        def loss(number: int, batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            if self.backend.leads_replica and not positions.isdisjoint(batch.positions):
                # Masked tokens are not scored. Read after the update: the device would be waited for here.
                scored = torch.where(batch.mask > 0, outputs.log_probs.detach().float(), torch.nan)
                found = zip(batch.positions, scored.split(batch.lengths), strict=True)
                self._scored.update({p: part for p, part in found if p in positions})
            samples = [work.samples[position] for position in batch.positions]
            return self.loss(batch, outputs, work.target(number), samples, max(1, denominator), sums)

        with self.ranks.leaving_on_error():
            self.backend.forward_backward(work.batches, loss, entropy=self.loss.entropy, logits=self.loss.logits)
        added = self.backend.model_losses()
        self._before_update()
        try:
            norm, lr = self.backend.optimizer_step()
        except NonFiniteGradient as error:
            cause = find_cause(error, work, self.backend, self.ranks)
            named = NonFiniteGradient(error.update, error.norm, error.parameters, cause)
            if not self.settings.skip_nonfinite_updates:
                raise named from None
            log.warning("skipped %s", named)
            return None
        metrics = {"train/grad_norm": norm, "train/lr-pg_0": lr}
        metrics |= {f"train/{name}": value for name, value in added.items()}
        local_sums = {name: float(value) for name, value in sums.items()} if self.backend.leads_replica else {}
        totals = self.ranks.add_numbers(local_sums)
        # Plans stored by an earlier version have no skipped weight.
        of_loss = self.loss.metrics(totals, update.get("skipped_weight", 0.0))
        return metrics | {f"train/{name}": value for name, value in of_loss.items()}


def _averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Averages each metric over the updates that have it. An update without samples to train has no entropy, say."""
    values: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}


@dataclasses.dataclass(frozen=True)
class _Assigned:
    """Micro-batches. updates: [update][replica]; shares: of this replica, for each update; scored: those of its passes
    that only score, if they differ."""

    updates: list[list[list[MicroBatch]]]
    shares: list[list[MicroBatch]]
    scored: list[list[MicroBatch]]

    @property
    def rows(self) -> int:
        """The number of forward passes of a replica, which all replicas have."""
        return sum(len(replicas[0]) for replicas in self.updates)

    def tokens(self, cost: Callable[[MicroBatch], float]) -> float:
        return sum(cost(batch) for replicas in self.updates for share in replicas for batch in share)


class _Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
