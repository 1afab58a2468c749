"""Training rewards from rewards, in float64 Python numbers.

For the n trajectories of a group (samples that share a `rollout_id` are one trajectory, whose reward is their mean):

    rho = r - b(r)                         b is the estimator's baseline
    rho = (r - b(r)) / (std(r) + 1e-6)     with the estimator's scale; unbiased std, of the group or of the iteration
    rho = r                                without a baseline, or with --disable-rewards-normalization

By the deviation of the iteration (Liu et al. 2025, arXiv:2508.08221) a group in which nearly all rewards are equal
weighs no more than others. Groups are known by `group_index`, never by position, so filtered or fanned-out iterations
normalise as whole ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

STD_EPSILON = 1e-6

# Rewards [n] of the trajectories of a group -> what is subtracted from each of them [n].
Baseline = Callable[[Sequence[float]], list[float]]


def normalize_rewards(
    rewards: Sequence[float],
    group_indexes: Sequence[Hashable],
    rollout_ids: Sequence[Hashable],
    *,
    baseline: Baseline | None,
    scale: bool,
    over_iteration: bool = False,
) -> list[float]:
    """Returns training rewards [S] of S samples. A group whose rewards are all equal gets exact zeros.

    scale: divide by the standard deviation of the group, where there is a baseline and more than one trajectory.
    over_iteration: by that of all trajectories, in place of their group's.
    """
    if baseline is None:
        return list(rewards)
    groups: dict[Hashable, dict[Hashable, list[float]]] = {}
    for reward, group, rollout in zip(rewards, group_indexes, rollout_ids, strict=True):
        groups.setdefault(group, {}).setdefault(rollout, []).append(reward)
    baselines: dict[Hashable, dict[Hashable, float]] = {}
    deviations: dict[Hashable, float | None] = {}
    averages = {group: [mean(samples) for samples in trajectories.values()] for group, trajectories in groups.items()}
    every = _deviation([value for values in averages.values() for value in values]) if over_iteration else None
    for group, trajectories in groups.items():
        baselines[group] = dict(zip(trajectories, baseline(averages[group]), strict=True))
        deviations[group] = None if not scale else every if over_iteration else _deviation(averages[group])
    normalized = []
    for reward, group, rollout in zip(rewards, group_indexes, rollout_ids, strict=True):
        centred, deviation = reward - baselines[group][rollout], deviations[group]
        normalized.append(centred if deviation is None else centred / (deviation + STD_EPSILON))
    return normalized


def mean(values: Sequence[float]) -> float:
    """Returns the mean; exact for equal values, for which fsum(n * r) / n need not be r."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float | None:
    """Returns the unbiased standard deviation; None for one value."""
    if len(values) < 2:
        return None
    average = mean(values)
    return math.sqrt(math.fsum([(v - average) ** 2 for v in values]) / (len(values) - 1))
