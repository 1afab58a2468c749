"""Metrics of an iteration's samples, computed from the buffer's summaries when the step is sealed.

They do not depend on whether this start of the run generated the groups or, with --buffer-dir, an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.buffer.groups.pacing import STALE
from slime.launcher.services.beside_training import BesideTraining, ComputingCalls
from slime.rollout.metrics import rollout_metrics
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sources.own import RETURNED
from slime.types.clients import SampleSummary
from slime.types.clients.buffer import SealedStep

DROPPED = "rollout/dynamic_filter/drop_"
# Reasons of rejections that do not come from --dynamic-sampling-filter-path.
OTHERS = (RETURNED, STALE, "buffer_filter", "prompt_too_long", "prompt_unusable")


class MetricsInProgress:
    """Metrics of sealed steps, computed by another thread while the trainer works on them.

    calls: runs functions in the background. args: every setting of the run as an attribute.
    """

    def __init__(self, calls: ComputingCalls, args: Any) -> None:
        self._args = args
        self._results: BesideTraining[dict[str, float]] = BesideTraining(calls)

    def begin(self, step: int, sealed: SealedStep, *, staleness: bool) -> None:
        """Begins with the metrics of `step`, in place of those that it had before."""
        self._results.begin(step, lambda: step_metrics(step, sealed, self._args, staleness=staleness))

    def take(self, step: int) -> dict[str, float]:
        """Waits for the metrics of `step` and returns them, once. Raises the error that computing them raised."""
        return self._results.take(step, {})


def step_metrics(step: int, sealed: SealedStep, args: Any, *, staleness: bool) -> dict[str, float]:
    """Returns the metrics of all groups of a step, including those that an earlier start of the run generated:

    rollout/trained_tokens  response tokens that count in the loss
    rollout/staleness       with `staleness`: weight versions between a sample's oldest token and the trainer, mean
                            and /max
    """
    metrics = sealed_metrics(sealed, args)
    metrics["rollout/trained_tokens"] = float(sum(s.loss_mask_sum for s in sealed if not s.remove_sample))
    if staleness:
        metrics |= staleness_metrics(step, [summary.oldest_weight_version for summary in sealed])
    return metrics


def sealed_metrics(sealed: SealedStep, args: Any) -> dict[str, float]:
    """Returns the metrics of a sealed step. args: every setting of the run as an attribute.

    Metrics of the sealed samples win over those of the rollout service, which knows only the groups that it generated
    last. With --custom-rollout-log-function-path only the service's are kept, because that function may replace them.
    """
    metrics = dict(sealed.metrics)
    if args.custom_rollout_log_function_path is not None:
        return metrics
    metrics |= rollout_metrics(sealed_groups(sealed), args)
    if args.fully_async:
        metrics["rollout/dropped_stale"] = float(sealed.rejected.get(STALE, 0))
    if args.fully_async or args.rollout_function_path == RolloutSettings.rollout_function_path:
        # The rollout service counts these; its metrics are missing if the run ended before they came.
        metrics = {"rollout/prompt_too_long": 0.0, "rollout/aborted_groups": 0.0} | metrics
    for reason in ("prompt_too_long", "prompt_unusable"):
        if f"rollout/{reason}" in metrics or reason in sealed.rejected:
            metrics[f"rollout/{reason}"] = float(sealed.rejected.get(reason, 0))
    if args.dynamic_sampling_filter_path:
        dropped = {reason: count for reason, count in sealed.rejected.items() if reason not in OTHERS}
        metrics |= {DROPPED + reason: float(count) for reason, count in dropped.items()}
    return metrics


def staleness_metrics(step: int, oldest_versions: Sequence[int]) -> dict[str, float]:
    """Returns mean and maximum of the number of versions between each sample's oldest token and the training on it.

    oldest_versions: -1 for a sample without versions. Versions newer than the trainer's count as the trainer's:
    --buffer-dir may hold samples of a run that got further than the checkpoint from which this one continues.
    """
    ages = [max(0, step - version) for version in oldest_versions if version >= 0]
    if not ages:
        return {}
    return {"rollout/staleness": sum(ages) / len(ages), "rollout/staleness/max": float(max(ages))}


def sealed_groups(sealed: Sequence[SampleSummary]) -> list[list[SampleSummary]]:
    groups: dict[int, list[SampleSummary]] = {}
    for summary in sealed:
        groups.setdefault(summary.group_index, []).append(summary)
    return list(groups.values())
