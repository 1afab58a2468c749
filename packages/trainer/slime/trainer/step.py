"""One training step on one rank: samples, log-probs, advantages, optimizer updates, metrics. Knows no service."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slime.trainer.algorithms import advantages as estimators
from slime.trainer.algorithms.kl import approximate_kl
from slime.trainer.backends.base import Backend, Outputs
from slime.trainer.batching.packing import PackedBatch, check_sample, pack
from slime.trainer.batching.plan import assign
from slime.trainer.batching.schedule import MicroBatch
from slime.trainer.collective import Ranks
from slime.trainer.losses import LOSS_TERMS, Loss, Sums, Targets
from slime.trainer.settings import TrainerSettings, flat_args
from slime.trainer.sharing import ReadSamples, ReplicaReader
from slime.types.errors import InvalidField
from slime.types.plugins import load_plugin
from slime.types.sample import Sample


@dataclasses.dataclass
class Work:
    """This rank's micro-batches of one update, and what each trains towards; None where the rank has no samples."""

    batches: list[PackedBatch | None]
    targets: list[Targets | None]


class TrainStep:
    """Runs steps of one trainer; `run` is collective."""

    def __init__(
        self, settings: TrainerSettings, backend: Backend, ranks: Ranks, extra_args: dict[str, Any] | None = None
    ) -> None:
        self.settings = settings
        self.backend = backend
        self.ranks = ranks
        self.loss = Loss(settings, extra_args)
        self._reader = ReplicaReader(ranks, backend)
        self.args = flat_args(settings, extra_args)
        path = settings.custom_advantage_function_path
        self._advantages: Callable[..., None] | None = None
        if path is not None:
            flag = "--custom-advantage-function-path"
            self._advantages = load_plugin(path, flag=flag, parameters=("args", "rollout_data"))

    def run(self, plan: dict[str, Any], read: ReadSamples) -> dict[str, float]:
        """Trains on the step that `plan` describes. Metrics "train/..." and "perf/..." are those of all ranks."""
        clock = _Clock()
        with clock.measure("perf/train_time"):
            with clock.measure("perf/train_data_time"):
                updates = self._read(plan, read)
            with clock.measure("perf/log_probs_time"):
                self._prepare(updates)
            results = []
            with clock.measure("perf/actor_train_time"):
                for number, work in enumerate(updates):
                    self.backend.begin_update(plan["step"], number)
                    results.append(self._update(plan["updates"][number], work))
        metrics = _averaged(results)
        metrics["train/lr-pg_0"] = results[-1]["train/lr-pg_0"]
        metrics["train/step"] = self.backend.updates
        metrics["train/skipped_samples"] = sum(len(update["skipped"]) for update in plan["updates"])
        metrics["train/dropped_samples"] = len(plan["dropped"])
        metrics["train/micro_batches"] = sum(len(work.batches) for work in updates)
        metrics |= clock.seconds
        tokens = sum(plan["lengths"][i] for update in plan["updates"] for i in update["train"])
        metrics["perf/actor_train_tokens_per_second"] = tokens / max(clock.seconds["perf/actor_train_time"], 1e-9)
        return metrics

    def _read(self, plan: dict[str, Any], read: ReadSamples) -> list[Work]:
        """This replica's share of every update, packed."""
        backend = self.backend
        shares = [
            assign(plan, number, backend.replicas, self.settings, backend.hidden_size, backend.micro_batch_multiple)[
                backend.replica
            ]
            for number in range(len(plan["updates"]))
        ]
        positions = [p for share in shares for micro_batch in share for p in micro_batch]
        samples = dict(zip(positions, self._reader.read(read, positions), strict=True))
        return self.ranks.together(lambda: self._pack(plan, shares, samples))

    def _pack(self, plan: dict[str, Any], shares: list[list[MicroBatch]], samples: dict[int, Sample]) -> list[Work]:
        needs_log_probs = self.settings.use_tis or self.settings.use_rollout_logprobs
        for position, sample in samples.items():
            check_sample(sample, self.backend.vocab_size, needs_log_probs=needs_log_probs)
            expected = plan["lengths"][position]
            if len(sample.tokens) != expected:
                raise InvalidField("tokens", len(sample.tokens), f"{expected} tokens, as planned (position {position})")
        works = []
        for share in shares:
            batches = [
                pack(
                    [samples[p] for p in micro_batch], micro_batch,
                    [plan["rewards"][p] for p in micro_batch], [plan["weights"][p] for p in micro_batch],
                    share_prompts=self.backend.can_share_prompts, device=self.backend.device,
                ) if micro_batch else None
                for micro_batch in share
            ]  # fmt: skip
            works.append(Work(batches, [None] * len(batches)))
        return works

    def _add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over replicas, on every rank."""
        return self.ranks.add(values if self.backend.leads_replica else torch.zeros_like(values))

    def _needs_old_log_probs(self, updates: int) -> bool:
        """Where the policy at the start of the update is the old policy, `log_probs.detach()` is the same number."""
        s = self.settings
        if s.use_rollout_logprobs or s.loss_type != "policy_loss":
            return False
        return updates > 1 or s.kl_coef != 0 or self._advantages is not None

    def _prepare(self, updates: list[Work]) -> None:
        """Sets the targets of every micro-batch of every update, before the first of them changes the policy."""
        s = self.settings
        if not s.compute_advantages_and_returns:
            return
        old_needed = self._needs_old_log_probs(len(updates))
        for work in updates:
            nothing: list[torch.Tensor | None] = [None] * len(work.batches)
            old = self.backend.log_probs(work.batches) if old_needed else nothing
            ref = self.backend.log_probs(work.batches, reference=True) if s.needs_reference else nothing
            for i, batch in enumerate(work.batches):
                if batch is not None:
                    mine = batch.rollout_log_probs if s.use_rollout_logprobs else old[i]
                    work.targets[i] = Targets(torch.empty(0), mine, ref[i])
        pairs = [
            (b, t)
            for work in updates
            for b, t in zip(work.batches, work.targets, strict=True)
            if b is not None and t is not None
        ]
        for batch, targets in pairs:
            targets.advantages = self._estimate(batch, targets)
        if s.normalize_advantages:
            sizes = [len(b.mask) for b, _ in pairs]
            none = torch.zeros(0, device=self.backend.device)
            values = torch.cat([none, *(t.advantages for _, t in pairs)])
            whitened = estimators.whiten(values, torch.cat([none, *(b.mask for b, _ in pairs)]), self._add)
            for (_, targets), part in zip(pairs, whitened.split(sizes), strict=True):
                targets.advantages = part

    def _estimate(self, batch: PackedBatch, targets: Targets) -> torch.Tensor:
        """[K] advantages before whitening."""
        s = self.settings
        kl = torch.zeros_like(batch.mask)
        if s.kl_coef:
            assert targets.old_log_probs is not None and targets.ref_log_probs is not None
            kl = approximate_kl(targets.old_log_probs, targets.ref_log_probs, s.kl_loss_type)
        if self._advantages is not None:
            data = _plugin_data(batch, targets, kl)
            self._advantages(self.args, data)
            return torch.cat(list(data["advantages"])).to(batch.mask)
        if s.advantage_estimator == "reinforce_plus_plus":
            return estimators.reinforce_plus_plus(
                batch.rewards, kl, batch.mask, batch.lengths, kl_coef=s.kl_coef, gamma=s.gamma
            )
        if s.advantage_estimator == "reinforce_plus_plus_baseline":
            return estimators.reinforce_plus_plus_baseline(batch.rewards, kl, batch.lengths, kl_coef=s.kl_coef)
        return estimators.broadcast_rewards(batch.rewards, batch.lengths)

    def _update(self, update: dict[str, Any], work: Work) -> dict[str, float]:
        """One optimizer update; its metrics."""
        sums: Sums = {}
        denominator = update["num_tokens"] if self.settings.calculate_per_token_loss else update["num_rollouts"]

        def loss(number: int, batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
            return self.loss(batch, outputs, work.targets[number], max(1, denominator), sums)

        self.backend.forward_backward(work.batches, loss, entropy=self.loss.entropy)
        added = self.backend.model_losses()
        norm, lr = self.backend.optimizer_step()
        metrics = {"train/loss": 0.0, "train/grad_norm": norm, "train/lr-pg_0": lr}
        metrics |= {f"train/{name}": value for name, value in added.items()}
        own = {name: float(value) for name, value in sums.items()} if self.backend.leads_replica else {}
        totals = self.ranks.add_numbers(own)
        weight = totals.pop("weight", 0.0)
        for name, total in totals.items():
            # A loss term is a sum over the plan's weights already; the rest are means over what was computed.
            metrics[f"train/{name}"] = total if name in LOSS_TERMS or not weight else total / weight
        return metrics


def _plugin_data(batch: PackedBatch, targets: Targets, kl: torch.Tensor) -> dict[str, Any]:
    """The `rollout_data` of an advantage function: one entry a sample of the micro-batch."""

    def split(values: torch.Tensor | None) -> list[torch.Tensor] | None:
        return None if values is None else list(values.split(batch.lengths))

    return {
        "rewards": batch.rewards.tolist(), "loss_masks": split(batch.mask), "kl": split(kl),
        "log_probs": split(targets.old_log_probs), "ref_log_probs": split(targets.ref_log_probs),
        "rollout_log_probs": split(batch.rollout_log_probs), "response_lengths": batch.lengths,
        "total_lengths": batch.total_lengths, "sample_positions": batch.positions,
    }  # fmt: skip


def _averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that have it: one without samples to train has no entropy, for one."""
    values: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}


class _Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started
