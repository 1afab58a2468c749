"""Metrics of --log-multi-turn, --log-correct-samples and --log-reward-category, as the original computes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.calls.chosen_metrics import CATEGORIES, category_shares
from slime.rollout.metrics import evaluation_metrics, rollout_metrics
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample


def settings(**values: Any) -> RolloutSettings:
    return RolloutSettings(hf_checkpoint="none", rollout_max_response_len=8, **values)


def sample(length: int, reward: Any = 0.0, **values: Any) -> Sample:
    return Sample(prompt="", tokens=[1] * (length + 2), response_length=length, reward=reward, **values)


SAMPLES = [
    sample(2, 1.0, rollout_log_probs=[-1.0, -3.0], metadata={"round_number": 1}),
    sample(8, 1.0, rollout_log_probs=[-1.0] * 8, loss_mask=[1] * 6 + [0] * 2, metadata={"round_number": 3}),
    sample(3, 0.5, rollout_log_probs=[-9.0] * 3, loss_mask=[0, 1, 0], metadata={"num_turns": 2}),
    sample(5, 0.0),
]


def test_nothing_of_it_is_logged_without_the_flags() -> None:
    names = rollout_metrics([SAMPLES], settings()).keys()
    assert not [name for name in names if name.startswith(("multi_turn", "rollout/correct", "rollout/error_cat"))]


def test_lengths_count_with_and_without_the_tokens_of_tools() -> None:
    metrics = rollout_metrics([SAMPLES], settings(log_multi_turn=True))
    assert {name: value for name, value in metrics.items() if name.startswith("multi_turn")} == {
        "multi_turn/raw_response_length/response_length_mean": 4.5,
        "multi_turn/raw_response_length/response_length_max": 8.0,
        "multi_turn/raw_response_length/response_length_min": 2.0,
        "multi_turn/raw_response_length/response_length_clip_ratio": 0.25,
        "multi_turn/wo_obs_response_length/response_length_mean": (2 + 6 + 1 + 5) / 4,
        "multi_turn/wo_obs_response_length/response_length_max": 6.0,
        "multi_turn/wo_obs_response_length/response_length_min": 1.0,
        "multi_turn/multi_turn_metric/round_number_mean": 2.0,
        "multi_turn/multi_turn_metric/round_number_max": 3.0,
        "multi_turn/multi_turn_metric/round_number_min": 1.0,
    }


def test_correct_samples_are_those_with_reward_1() -> None:
    metrics = rollout_metrics([SAMPLES], settings(log_correct_samples=True))
    assert {name: value for name, value in metrics.items() if name.startswith("rollout/correct")} == {
        "rollout/correct_response_lengths": 5.0,
        "rollout/correct_length/p25": 0.5,
        "rollout/correct_length/p50": 0.0,
        "rollout/correct_length/p75": 0.0,
        "rollout/correct_length/p100": 0.5,
        "rollout/correct_entropy": (2.0 + 1.0) / 2,
    }
    wrong = rollout_metrics([SAMPLES[2:]], settings(log_correct_samples=True))
    assert not [name for name in wrong if name.startswith("rollout/correct")]


@given(st.lists(st.integers(1, 8), min_size=1, max_size=20), st.integers(1, 8))
def test_quarters_hold_every_correct_sample_once(lengths: list[int], limit: int) -> None:
    args = RolloutSettings(hf_checkpoint="none", rollout_max_response_len=limit, log_correct_samples=True)
    metrics = rollout_metrics([[sample(length, 1.0) for length in lengths]], args)
    shares = [metrics[f"rollout/correct_length/p{part}"] for part in (25, 50, 75, 100)]
    assert math.isclose(sum(shares), 1.0)
    # A length belongs to the first quarter that reaches up to it.
    assert shares[0] == sum(length <= limit / 4 for length in lengths) / len(lengths)


def test_categories_are_values_of_the_reward_in_training_and_evaluation() -> None:
    rewards = [
        {"score": 1.0, "why": "right"},
        {"score": 0.0, "why": "format"},
        {"score": 0.0, "why": "format"},
        {"score": 0.0},
    ]
    samples = [sample(1, reward, group_index=0, index=index) for index, reward in enumerate(rewards)]
    args = settings(reward_key="score", log_reward_category="why")
    metrics = rollout_metrics([samples], args)
    shares = {"error_cat/right": 0.25, "error_cat/format": 0.5, "error_cat/none": 0.25}
    assert {name: value for name, value in metrics.items() if "error_cat" in name} == {
        f"rollout/{name}": share for name, share in shares.items()
    }
    result = {"rewards": [1.0, 0.0, 0.0, 0.0], "samples": samples}
    evaluated = evaluation_metrics({"held": result}, args)
    assert {name: value for name, value in evaluated.items() if "error_cat" in name} == {
        f"eval/held/{name}": share for name, share in shares.items()
    }


def test_rewards_that_write_free_text_make_a_bounded_number_of_metrics() -> None:
    shares = category_shares([sample(1, {"why": f"text {number}"}) for number in range(200)], "why")
    assert len(shares) == CATEGORIES + 1 and shares["error_cat/other"] == pytest.approx(0.75)
    assert sum(shares.values()) == pytest.approx(1.0)
