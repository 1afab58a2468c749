"""Answers of evaluation functions are counted as they are meant, or refused with their name."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np
import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.calls.answers import evaluation_output, train_output
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.metrics import evaluation_metrics, pass_rates, rollout_metrics
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import PluginError

ARGS = argparse.Namespace(log_passrate=True, n_samples_per_eval_prompt=2, eval_overrides={}, log_reward_category=None)


def sample(group: int | None, rollout: int | None) -> Sample:
    return Sample(prompt="", group_index=group, rollout_id=rollout, response_length=1)


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer() -> None:
    groups: list[list[float]] = [[1, 0, 0, 1], [0, 0, 0.5, 0], [0, 1, 0, 0]]
    for k in (1, 2, 4):
        draws = [[any(r == 1 for r in draw) for draw in itertools.combinations(group, k)] for group in groups]
        assert pass_rates(groups)[f"pass@{k}"] == pytest.approx(np.mean([np.mean(group) for group in draws]))


def test_segments_of_one_sample_are_evaluated_once() -> None:
    # The second sample of the first prompt fanned out into three.
    samples = [sample(0, 0), *[sample(0, 1)] * 3, sample(1, 2), sample(1, 3)]
    data = {"a": {"rewards": [0, 1, 1, 1, 0, 0], "truncated": [False] * 6, "samples": samples}}
    metrics = evaluation_metrics(data, ARGS)
    assert (metrics["eval/a"], metrics["eval/a-pass@1"], metrics["eval/a-pass@2"]) == (0.25, 0.25, 0.5)


def test_rewards_of_samples_that_name_no_prompt_are_cut_into_prompts() -> None:
    for more in ({}, {"samples": [sample(None, None)] * 4}):
        assert evaluation_metrics({"a": {"rewards": [0, 1, 0, 0], **more}}, ARGS)["eval/a-pass@2"] == 0.5


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"rewards": None}, "rewards of a: got NoneType, expected a list"),
        ({"rewards": ["x"]}, "rewards of a: got 'x', expected finite numbers"),
        ({"rewards": [None]}, "rewards of a: got None, expected finite numbers"),
        ({"rewards": [float("nan")]}, "rewards of a: got nan"),
        ({"rewards": [1], "truncated": [0, 0]}, "1 rewards, 2 truncated, expected lists of one length"),
        ({"rewards": [1], "samples": ["x"]}, "samples of a: got str, expected Samples"),
    ],
)
def test_an_evaluation_that_cannot_be_counted_is_refused(result: dict[str, Any], words: str) -> None:
    with pytest.raises(PluginError, match=f"--eval-function-path mine.f: .*{words}"):
        evaluation_output({"a": result}, "mine.f")


def test_a_sample_without_a_reward_counts_for_nothing() -> None:
    rewarded, plain = Sample(prompt="", reward=1.0, response_length=2), Sample(prompt="", response_length=4)
    metrics = rollout_metrics([[rewarded, plain]], RolloutSettings(hf_checkpoint="none"))
    assert (metrics["rollout/raw_reward"], metrics["rollout/response_lengths"]) == (1.0, 3.0)


def test_arrays_are_lists_of_numbers() -> None:
    result = {"rewards": np.array([0.0, 1.0]), "truncated": np.array([True, False])}
    metrics = evaluation_metrics(evaluation_output({"a": result}, "mine.f").data, ARGS)
    assert (metrics["eval/a"], metrics["eval/a-truncated_ratio"]) == (0.5, 0.5)


def test_metrics_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(PluginError, match="--rollout-function-path f: answered list, expected metrics"):
        train_output(RolloutFnTrainOutput(samples=[], metrics=[1]), "f")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="--eval-function-path f: answered int, expected metrics"):
        evaluation_output(RolloutFnEvalOutput(data={}, metrics=3), "f")  # type: ignore[arg-type]


@pytest.mark.parametrize(("answer", "keep"), [(True, True), (0, False), (np.bool_(True), True), (np.float64(0), False)])
def test_a_filter_may_answer_a_truth_value(answer: Any, keep: bool) -> None:
    assert DynamicFilterOutput.of(answer).keep is keep


@pytest.mark.parametrize("answer", [None, "no", (False, "too easy"), {"keep": True}])
def test_a_filter_that_answers_something_else_is_refused(answer: Any) -> None:
    with pytest.raises(PluginError, match=f"--dynamic-sampling-filter-path: answered {type(answer).__name__}"):
        DynamicFilterOutput.of(answer)
