"""Calls that produce samples, and continue once a lost service is back: generate, evaluate, load."""

from __future__ import annotations

from collections.abc import Callable

from slime.launcher.services.replay import Replay
from slime.launcher.services.start import WORKER, Progress
from slime.launcher.services.supervisor import Supervisor
from slime.launcher.services.weight_updates import WeightUpdates
from slime.rollout.metrics import CURRENT
from slime.types.clients import BufferClient, RolloutClient
from slime.types.clients.rollout import EvaluateResult, StopSignal
from slime.types.pace import TrainerPace

Metrics = dict[str, float]


class RolloutCalls:
    """Calls of the rollout service that survive its loss. weight_updates: None for a run without engines or trainer.
    timeout_seconds: limit of one call."""

    def __init__(
        self,
        supervisor: Supervisor,
        buffer: BufferClient,
        rollout: RolloutClient,
        weight_updates: WeightUpdates | None,
        progress: Progress,
        timeout_seconds: float,
    ) -> None:
        self._supervisor, self._buffer, self._rollout = supervisor, buffer, rollout
        self._weight_updates = weight_updates
        self._progress = progress
        self._timeout = timeout_seconds

    def generate(self, rollout_id: int, num_groups: int, *, alone: bool) -> Metrics:
        """Generates groups; if the service was lost meanwhile, generates the groups that are missing.

        alone: the buffer has no completed group that no step has taken. All groups then start over, so that they are
        generated in the same batches as in an undisturbed run.
        """
        before = 0 if alone or self._supervisor.repeats is None else self._complete()
        begun = False

        def generate() -> Metrics:
            nonlocal begun
            missing = num_groups
            if begun:
                self._buffer.requeue_groups(WORKER, unsealed=alone)
                missing = num_groups if alone else num_groups - (self._complete() - before)
            begun = True
            if missing <= 0:
                return {}
            self._restore_weights()
            result = self._rollout.generate(
                rollout_id,
                missing,
                timeout=self._timeout,
                on_progress=lambda done, total: self._progress("generating", done, total),
                # `MetricsInProgress` computes those, over all groups of the step, while the trainer works.
                summary_metrics=False,
            )
            return result.metrics

        return self._supervisor.call(generate)

    def generate_on(
        self, rollout_id: int, pace: TrainerPace, stop: StopSignal, on_metrics: Callable[[Metrics], None]
    ) -> None:
        """Generates until `stop` is set, as `RolloutClient.generate_on` does; the sums include those before a loss."""
        sums: Metrics = {}
        begun = False

        def attempt() -> None:
            nonlocal begun
            if begun:
                self._buffer.requeue_groups(WORKER)
                self._restore_weights()
            begun, before = True, dict(sums)

            def note(new: Metrics) -> None:
                summed = {name: value + before.get(name, 0.0) for name, value in new.items() if name not in CURRENT}
                sums.update(new | summed)
                on_metrics(dict(sums))

            if not stop.is_set:
                self._rollout.generate_on(rollout_id, pace, stop, note)

        self._supervisor.call(attempt)

    def evaluate(self, rollout_id: int) -> EvaluateResult:
        def evaluate() -> EvaluateResult:
            self._restore_weights()
            return self._rollout.evaluate(
                rollout_id,
                timeout=self._timeout,
                on_progress=lambda done, total: self._progress("evaluating", done, total),
            )

        return self._supervisor.call(evaluate)

    def _complete(self) -> int:
        return self._buffer.stats().groups.get("completed", 0)

    def _restore_weights(self) -> None:
        if self._weight_updates is not None:
            self._weight_updates.restore()


def load(supervisor: Supervisor, buffer: BufferClient, replay: Replay, rollout_id: int) -> tuple[int, Metrics]:
    """Completes the groups of a recorded iteration; returns (number of groups, metrics)."""
    begun = False

    def attempt() -> tuple[int, Metrics]:
        nonlocal begun
        if begun:
            buffer.requeue_groups(replay.WORKER, unsealed=True)
        begun = True
        return replay.generate(rollout_id)

    return supervisor.call(attempt)
