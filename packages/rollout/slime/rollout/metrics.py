"""Metrics of an iteration and of an evaluation, computed from finished samples."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from slime.rollout.calls.chosen_metrics import Measured, category_shares, chosen_metrics
from slime.rollout.settings.eval_overrides import set_args
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.sample.status import SampleStatus

ENGINES = "rollout/engines"
CONCURRENCY = "rollout/concurrency"
# They tell how the engines are now. Of a call that generates without end, all other metrics are sums.
CURRENT = frozenset({ENGINES, CONCURRENCY, f"{CONCURRENCY}/min", f"{CONCURRENCY}/max"})


def rollout_metrics(groups: Sequence[Sequence[Measured]], args: RolloutSettings) -> dict[str, float]:
    """Returns the metrics of an iteration. groups: flat lists of samples. The segments that one sample
    fanned out into count as one reward.

    rollout/raw_reward            mean reward
    rollout/reward_std            mean over groups of the population standard deviation of the rewards
    rollout/zero_std_ratio        share of groups with equal rewards, among those with at least two
    rollout/response_lengths      mean, and /max, /min, in tokens
    rollout/truncated_ratio       share of samples that ran into the length limit
    rollout/weight_version_min    oldest weight version of any token; _max: the newest
    passrate/pass@k               with --log-passrate
    multi_turn/..., rollout/correct_..., rollout/error_cat/...   see `chosen_metrics`
    rollout/agents/...            see `agent_metrics`
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        return {}
    rewards = [values for values in (_rewards(group, args) for group in groups) if values]
    flat = np.asarray([value for values in rewards for value in values], np.float64)
    lengths = np.asarray([sample.response_length for sample in samples])
    metrics = {
        "rollout/raw_reward": float(flat.mean()) if rewards else 0.0,
        "rollout/reward_std": float(np.mean(_deviations(rewards))) if rewards else 0.0,
        "rollout/zero_std_ratio": _share(max(v) - min(v) <= 1e-6 for v in rewards if len(v) > 1),
        "rollout/response_lengths": float(lengths.mean()),
        "rollout/response_lengths/max": float(lengths.max()),
        "rollout/response_lengths/min": float(lengths.min()),
        "rollout/truncated_ratio": _share(sample.status is SampleStatus.TRUNCATED for sample in samples),
    }
    failed = _share(sample.status is SampleStatus.FAILED for sample in samples)
    if failed:
        metrics["rollout/failed_ratio"] = failed
    named = {version for sample in samples for version in sample.weight_versions}
    versions = [int(version) for version in named if str(version).isdigit()]
    if versions:
        metrics |= {
            "rollout/weight_version_min": float(min(versions)),
            "rollout/weight_version_max": float(max(versions)),
        }
    if args.log_passrate:
        metrics |= {f"passrate/{key}": value for key, value in pass_rates(rewards).items()}
    correct = [sample for sample in samples if _raw_reward(sample, args) == 1] if args.log_correct_samples else []
    chosen = chosen_metrics(samples, correct, args, args.rollout_max_response_len)
    return metrics | chosen | agent_metrics(samples)


def agent_metrics(samples: Iterable[Measured]) -> dict[str, float]:
    """Returns metrics of the episodes of agents; empty where there were none.

    rollout/agents/episodes, /failed   numbers of episodes
    rollout/agents/segments, /turns    means per episode, failed ones left out
    rollout/agents/branches            segments that begin inside another one
    rollout/agents/drifted_turns       turns whose history was encoded again, and gave other tokens
    """
    episodes: dict[Any, list[Measured]] = {}
    for sample in samples:
        session = sample.metadata.get("gateway_session_id") if isinstance(sample.metadata, dict) else None
        if session is not None:
            episodes.setdefault(session, []).append(sample)
    if not episodes:
        return {}
    good = [sample for episode in episodes.values() for sample in episode if "episode_error" not in sample.metadata]
    count = len({sample.metadata["gateway_session_id"] for sample in good})
    metrics: dict[str, float] = {
        "rollout/agents/episodes": len(episodes),
        "rollout/agents/failed": len(episodes) - count,
    }
    if good:
        metrics |= {
            "rollout/agents/segments": len(good) / count,
            "rollout/agents/turns": sum(sample.metadata["num_turns"] for sample in good) / count,
            "rollout/agents/branches": sum(sample.metadata["branch"] for sample in good),
            "rollout/agents/drifted_turns": sum(sample.metadata["drifted_turns"] for sample in good),
        }
    return metrics


def time_metrics(samples: Iterable[Sample], seconds: float, reward_seconds: float) -> dict[str, float]:
    """Returns perf/rollout_time and perf/reward_time in seconds (the latter summed over samples scored at once), and
    perf/tokens_per_second in response tokens."""
    tokens = sum(sample.response_length for sample in samples)
    return {
        "perf/rollout_time": seconds,
        "perf/reward_time": reward_seconds,
        "perf/tokens_per_second": tokens / max(seconds, 1e-9),
    }


def evaluation_metrics(data: Mapping[str, Mapping[str, Any]], args: RolloutSettings) -> dict[str, float]:
    """Returns eval/NAME (mean reward), and -truncated_ratio, -response_length (mean), -pass@k with --log-passrate,
    /error_cat/VALUE with --log-reward-category.

    The segments that one sample fanned out into count as one reward.
    """
    metrics: dict[str, float] = {}
    for name, result in data.items():
        samples: Sequence[Sample] = result.get("samples") or ()
        groups = _evaluated(result["rewards"], samples, set_args(args, name).n_samples_per_eval_prompt)
        if not groups:
            continue
        metrics[f"eval/{name}"] = float(np.mean([reward for group in groups for reward in group]))
        if result.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = _share(result["truncated"])
        if samples:
            metrics[f"eval/{name}-response_length"] = float(np.mean([sample.response_length for sample in samples]))
        if args.log_passrate:
            metrics |= {f"eval/{name}-{key}": value for key, value in pass_rates(groups).items()}
        if args.log_reward_category is not None and samples:
            shares = category_shares(samples, args.log_reward_category)
            metrics |= {f"eval/{name}/{key}": share for key, share in shares.items()}
    return metrics


def _evaluated(rewards: Sequence[Any], samples: Sequence[Sample], n: int) -> list[list[float]]:
    """Returns the rewards grouped by prompt, one for each sample, even if it fanned out into segments.

    Without group indexes, every `n` rewards in a row are those of one prompt.
    """
    values = [float(reward) for reward in rewards]
    if not samples or any(sample.group_index is None for sample in samples):
        return [values[i : i + n] for i in range(0, len(values), n)]
    groups: dict[int | None, dict[Any, float]] = {}
    for position, (sample, value) in enumerate(zip(samples, values, strict=True)):
        key = ("rollout", sample.rollout_id) if sample.rollout_id is not None else ("sample", position)
        groups.setdefault(sample.group_index, {}).setdefault(key, value)
    return [list(group.values()) for group in groups.values()]


def pass_rates(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Returns unbiased pass@k for k = 1, 2, 4, ... up to the size of a group; a reward of 1 is correct.

    pass@k = 1 - prod_{j = n - c + 1}^{n} (1 - k / j), for c correct of n (Chen et al., 2021).
    """
    rates: dict[str, float] = {}
    largest = max((len(group) for group in groups), default=0)
    k = 1
    while k <= largest:
        values = []
        for group in groups:
            n, correct = len(group), sum(reward == 1 for reward in group)
            if n < k:
                continue
            values.append(1.0 if n - correct < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - correct + 1, n + 1))))
        rates[f"pass@{k}"] = float(np.mean(values))
        k *= 2
    return rates


def _rewards(group: Sequence[Measured], args: RolloutSettings) -> list[float]:
    values: dict[Any, float] = {}
    for position, sample in enumerate(group):
        key = ("rollout", sample.rollout_id) if sample.rollout_id is not None else ("sample", position)
        value = _raw_reward(sample, args)
        if value is not None:
            values.setdefault(key, value)
    return list(values.values())


def _deviations(groups: Sequence[Sequence[float]]) -> np.ndarray:
    """Returns the population standard deviation [G] of each group: for groups of one size in one call, which gives the
    same bits as a call for each."""
    of_size: dict[int, list[int]] = {}
    for position, values in enumerate(groups):
        of_size.setdefault(len(values), []).append(position)
    deviations = np.empty(len(groups))
    for positions in of_size.values():
        deviations[positions] = np.std([groups[position] for position in positions], axis=1)
    return deviations


def _raw_reward(sample: Measured, args: RolloutSettings) -> float | None:
    """Returns the reward as it was before a penalty; None for a sample without one."""
    # Metadata may hold anything that a client sent.
    value = sample.metadata.get("raw_reward") if sample.metadata else None
    if value is not None and _is_number(value):
        return float(value)
    value = _reward(sample, args)
    return float(value) if _is_number(value) else None


def _reward(sample: Measured, args: RolloutSettings) -> Any:
    """Returns the reward, or its entry `args.reward_key`; None where there is none.

    A sample that failed before it was scored is left out of the metrics. If it is to be trained on, the buffer or the
    trainer raises an error that names it.
    """
    if isinstance(sample.reward, dict):
        return None if args.reward_key is None else sample.reward.get(args.reward_key)
    return sample.reward


def _is_number(value: Any) -> TypeGuard[float]:
    # The check of an abstract class takes several times as long as that of float.
    return isinstance(value, (float, numbers.Real, np.bool_)) and math.isfinite(value)


def _share(flags: Iterable[bool]) -> float:
    values = [bool(flag) for flag in flags]
    return sum(values) / len(values) if values else 0.0
