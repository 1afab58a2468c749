"""From rewards to training rewards, in float64 Python numbers.

For group g with trajectories j (samples that share a `rollout_id` are one trajectory, whose reward is their mean):

    rho = r - mean_j(r_j)                          grpo, gspo, cispo, reinforce_plus_plus_baseline
    rho = (r - mean_j(r_j)) / (std_j(r_j) + 1e-6)  grpo, gspo, cispo, unless std normalisation is off; unbiased std
    rho = r                                        other estimators, or rewards normalisation off

Source: GRPO (arXiv:2402.03300, section 4.1.2), Dr.GRPO (arXiv:2503.20783) without the division. Groups are known by
`group_index`, never by position, so filtered or fanned-out steps normalise as whole ones do.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

STD_EPSILON = 1e-6


def normalize_rewards(
    rewards: Sequence[float],
    group_indexes: Sequence[Hashable],
    rollout_ids: Sequence[Hashable],
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
) -> list[float]:
    """Training rewards [S] of S samples. A group whose rewards are all equal gets exact zeros."""
    if not subtract_mean:
        return list(rewards)
    trajectories: dict[Hashable, dict[Hashable, list[float]]] = {}
    for reward, group, rollout in zip(rewards, group_indexes, rollout_ids, strict=True):
        trajectories.setdefault(group, {}).setdefault(rollout, []).append(reward)
    moments = {group: _moments([_mean(r) for r in rollouts.values()]) for group, rollouts in trajectories.items()}
    normalized = []
    for reward, group in zip(rewards, group_indexes, strict=True):
        mean, std = moments[group]
        centred = reward - mean
        normalized.append(centred / (std + STD_EPSILON) if divide_by_std and std is not None else centred)
    return normalized


def _mean(values: Sequence[float]) -> float:
    # Exact for equal values: fsum(n * r) / n need not be r.
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


def _moments(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and unbiased standard deviation; no deviation for one value."""
    mean = _mean(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
