"""Metrics of samples that flags ask for, under the original's names; pass@k is in `metrics`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from slime.rollout.settings.metrics import MetricSettings
from slime.types import Sample
from slime.types.sample.status import SampleStatus

QUARTERS = 4
# A reward that writes free text must not make a metric of each text.
CATEGORIES = 50
NO_CATEGORY, OTHER_CATEGORIES = "none", "other"


class Measured(Protocol):
    """The fields of a sample that its metrics come from; a summary of the buffer has them too."""

    @property
    def rollout_id(self) -> int | None: ...
    @property
    def response_length(self) -> int: ...
    @property
    def effective_response_length(self) -> int: ...
    @property
    def reward(self) -> float | dict[str, Any] | None: ...
    @property
    def status(self) -> SampleStatus: ...
    @property
    def metadata(self) -> dict[str, Any]: ...
    @property
    def weight_versions(self) -> list[str]: ...


def category_shares(samples: Sequence[Measured], key: str) -> dict[str, float]:
    """Returns error_cat/VALUE: the share of samples whose reward has VALUE under `key`, for the 50 most frequent ones.

    error_cat/none: samples whose reward has no such entry. error_cat/other: samples with rarer values.
    """
    counts = Counter(
        str(sample.reward.get(key, NO_CATEGORY)) if isinstance(sample.reward, dict) else NO_CATEGORY
        for sample in samples
    )
    shown = dict(counts.most_common(CATEGORIES))
    rest = len(samples) - sum(shown.values())
    if rest:
        shown[OTHER_CATEGORIES] = shown.get(OTHER_CATEGORIES, 0) + rest
    return {f"error_cat/{value}": count / len(samples) for value, count in shown.items()}


def multi_turn_metrics(samples: Sequence[Measured], max_response_len: int) -> dict[str, float]:
    """Returns the metrics of --log-multi-turn, each _mean, _max and _min.

    multi_turn/raw_response_length/response_length   all tokens of the response; _clip_ratio: the share of samples with
                                                     at least `max_response_len` of them
    multi_turn/wo_obs_response_length/response_length   tokens with loss mask 1: not those of tools and users
    multi_turn/multi_turn_metric/round_number        turns, of the samples whose metadata counts them
    """
    lengths = [sample.response_length for sample in samples]
    name = "multi_turn/raw_response_length/response_length"
    metrics = _spread(name, lengths)
    metrics[f"{name}_clip_ratio"] = sum(length >= max_response_len for length in lengths) / len(lengths)
    generated = [sample.effective_response_length for sample in samples]
    metrics |= _spread("multi_turn/wo_obs_response_length/response_length", generated)
    turns = [number for number in map(_turns, samples) if number is not None]
    if turns:
        metrics |= _spread("multi_turn/multi_turn_metric/round_number", turns)
    return metrics


def correct_metrics(samples: Sequence[Measured], max_response_len: int) -> dict[str, float]:
    """Returns the metrics of --log-correct-samples, where there are any. samples: those with reward 1.

    rollout/correct_response_lengths   mean, in tokens
    rollout/correct_length/p25         share of them with at most a quarter of `max_response_len` tokens; p50, p75 and
                                       p100: with more, up to that part of it
    rollout/correct_entropy            mean over them of the mean of -log p over tokens with loss mask 1, where p is the
                                       engine's, which the buffer's summaries do not have
    """
    if not samples:
        return {}
    lengths = np.asarray([sample.response_length for sample in samples])
    quarters = np.clip(np.ceil(lengths * QUARTERS / max_response_len), 1, QUARTERS)
    metrics = {"rollout/correct_response_lengths": float(lengths.mean())}
    for number in range(1, QUARTERS + 1):
        metrics[f"rollout/correct_length/p{100 * number // QUARTERS}"] = float(np.mean(quarters == number))
    entropies = [value for value in map(_surprise, samples) if value is not None]
    if entropies:
        metrics["rollout/correct_entropy"] = float(np.mean(entropies))
    return metrics


def chosen_metrics(
    samples: Sequence[Measured], correct: Sequence[Measured], settings: MetricSettings, max_response_len: int
) -> dict[str, float]:
    """Returns the metrics of an iteration that flags ask for. correct: the samples with reward 1."""
    metrics: dict[str, float] = {}
    if settings.log_multi_turn:
        metrics |= multi_turn_metrics(samples, max_response_len)
    if settings.log_correct_samples:
        metrics |= correct_metrics(correct, max_response_len)
    if settings.log_reward_category is not None:
        shares = category_shares(samples, settings.log_reward_category)
        metrics |= {f"rollout/{name}": share for name, share in shares.items()}
    return metrics


def _spread(name: str, values: Iterable[float]) -> dict[str, float]:
    array = np.asarray([float(value) for value in values])
    return {f"{name}_mean": float(array.mean()), f"{name}_max": float(array.max()), f"{name}_min": float(array.min())}


def _turns(sample: Measured) -> float | None:
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    for key in ("round_number", "num_turns"):
        value = metadata.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def _surprise(sample: Measured) -> float | None:
    """Returns the mean of -log p over the tokens with loss mask 1; None without them or their log-probs."""
    if not isinstance(sample, Sample) or sample.rollout_log_probs is None:
        return None
    log_probs = np.asarray(sample.rollout_log_probs, np.float64)
    mask = np.ones(sample.response_length) if sample.loss_mask is None else np.asarray(sample.loss_mask)
    counted = (mask != 0) & np.isfinite(log_probs)
    return -float(log_probs[counted].mean()) if counted.any() else None
