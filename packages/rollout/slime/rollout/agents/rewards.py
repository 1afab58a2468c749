"""Rewards of whole episodes, for `--custom-reward-post-process-path`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.rollout.agents.settings import STRATEGIES, given
from slime.types import Sample
from slime.types.errors import InvalidSetting

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

EPSILON = 1e-6


def normalize_episode_rewards(args: RolloutArgs, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Returns (raw rewards, training rewards), one of each per sample.

    An episode consists of the samples of one group and one session; all of them get the reward of its first sample.
    `args.reward_postprocessing` is "identity", or "grpo": the mean over the group's episodes is subtracted and, with
    `args.grpo_std_normalization`, the result divided by the population standard deviation + 1e-6, or set to zero where
    that deviation is at most 1e-6. Failed episodes are left out of these statistics and get zeros. Raises
    InvalidSetting for another value.
    """
    strategy = given(args, "reward_postprocessing") or "grpo"
    if strategy not in STRATEGIES:
        raise InvalidSetting.one_of("reward_postprocessing", STRATEGIES, got=strategy)
    episodes: dict[Any, dict[Any, float]] = {}
    keys: list[tuple[Any, Any] | None] = []
    for position, sample in enumerate(samples):
        # Padding samples, which some rollout functions add, have group -1.
        if sample.status is Sample.Status.FAILED or sample.group_index == -1:
            keys.append(None)
            continue
        session = sample.metadata.get("gateway_session_id", sample.rollout_id)
        key = (sample.group_index, ("sample", position) if session is None else session)
        keys.append(key)
        group = episodes.setdefault(key[0], {})
        if key[1] not in group:
            group[key[1]] = float(sample.get_reward_value(args))
    divide = bool(getattr(args, "grpo_std_normalization", True))
    trained = episodes if strategy == "identity" else {g: _grpo(r, divide) for g, r in episodes.items()}
    raw = [0.0 if key is None else episodes[key[0]][key[1]] for key in keys]
    return raw, [0.0 if key is None else trained[key[0]][key[1]] for key in keys]


def _grpo(rewards: dict[Any, float], divide: bool) -> dict[Any, float]:
    count = len(rewards)
    mean = math.fsum(rewards.values()) / count
    if not divide:
        return {key: value - mean for key, value in rewards.items()}
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in rewards.values()) / count)
    if std <= EPSILON:
        return dict.fromkeys(rewards, 0.0)
    return {key: (value - mean) / (std + EPSILON) for key, value in rewards.items()}
