"""Training rewards from rewards, in float64 Python numbers.

For the n trajectories of a group (samples that share a `rollout_id` are one trajectory, whose reward is their mean):

    rho = r - b(r)                         b is the estimator's baseline
    rho = (r - b(r)) / (std(r) + 1e-6)     with the estimator's scale; unbiased std
    rho = r                                without a baseline, or with --disable-rewards-normalization

Groups are known by `group_index`, never by position, so filtered or fanned-out iterations normalise as whole ones do.
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
) -> list[float]:
    """Returns training rewards [S] of S samples. A group whose rewards are all equal gets exact zeros.

    scale: divide by the standard deviation of the group, where there is a baseline and more than one trajectory.
    """
    if baseline is None:
        return list(rewards)
    groups: dict[Hashable, dict[Hashable, list[float]]] = {}
    for reward, group, rollout in zip(rewards, group_indexes, rollout_ids, strict=True):
        groups.setdefault(group, {}).setdefault(rollout, []).append(reward)
    baselines: dict[Hashable, dict[Hashable, float]] = {}
    deviations: dict[Hashable, float | None] = {}
    for group, trajectories in groups.items():
        of_trajectories = [mean(of_samples) for of_samples in trajectories.values()]
        baselines[group] = dict(zip(trajectories, baseline(of_trajectories), strict=True))
        deviations[group] = _deviation(of_trajectories) if scale else None
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
    return math.sqrt(math.fsum((v - average) ** 2 for v in values) / (len(values) - 1))
