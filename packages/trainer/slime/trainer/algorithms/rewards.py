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
    groups: dict[Hashable, list[int]] = {}
    for position, (group, _, _) in enumerate(zip(group_indexes, rollout_ids, rewards, strict=True)):
        groups.setdefault(group, []).append(position)
    # (positions, for each of them the number of its trajectory, means of the trajectories)
    found = []
    for positions in groups.values():
        numbers = _numbered([rollout_ids[position] for position in positions])
        found.append((positions, numbers, _means([rewards[position] for position in positions], numbers)))
    every = _deviation([value for *_, values in found for value in values]) if over_iteration else None
    normalized = [0.0] * len(rewards)
    for positions, numbers, values in found:
        baselines = baseline(values)
        deviation = None if not scale else every if over_iteration else _deviation(values)
        divisor = 1.0 if deviation is None else deviation + STD_EPSILON
        for position, number in zip(positions, numbers, strict=True):
            normalized[position] = (rewards[position] - baselines[number]) / divisor
    return normalized


def _numbered(keys: Sequence[Hashable]) -> Sequence[int]:
    """Returns for each key its number, in order of first occurrence."""
    if len(set(keys)) == len(keys):
        return range(len(keys))
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _means(rewards: list[float], numbers: Sequence[int]) -> list[float]:
    """Returns the mean reward of each trajectory."""
    # Mostly each sample is a trajectory of its own.
    if numbers == range(len(rewards)):
        return rewards
    trajectories: dict[int, list[float]] = {}
    for reward, number in zip(rewards, numbers, strict=True):
        trajectories.setdefault(number, []).append(reward)
    return [mean(samples) for samples in trajectories.values()]


def mean(values: Sequence[float]) -> float:
    """Returns the mean; exact for equal values, for which fsum(n * r) / n need not be r."""
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float | None:
    """Returns the unbiased standard deviation; None for one value."""
    if len(values) < 2:
        return None
    average = mean(values)
    return math.sqrt(math.fsum([(v - average) ** 2 for v in values]) / (len(values) - 1))
