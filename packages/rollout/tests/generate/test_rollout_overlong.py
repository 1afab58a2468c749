"""Responses near the length limit and beyond, by DAPO's rules."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.generate.group import generate_and_rm, generate_and_rm_group
from slime.rollout.generate.state import RolloutState
from slime.rollout.metrics import rollout_metrics
from slime.rollout.rewards.score import overlong_penalty, score_group, score_sample
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import InvalidSetting

LIMIT = 100


def args(**values: Any) -> Namespace:
    base = dict(
        rm_type=None, custom_rm_path=f"{__name__}.one", reward_key=None, eval_reward_key=None, overlong_mask=False,
        overlong_buffer_len=20, overlong_penalty=0.5, rollout_max_response_len=LIMIT, log_passrate=False,
        log_multi_turn=False, log_correct_samples=False, log_reward_category=None,
    )  # fmt: skip
    return Namespace(**(base | values))


async def one(args: Any, sample: Sample) -> float:
    return 1.0


async def graded(args: Any, sample: Sample) -> dict[str, Any]:
    return {"score": 1.0, "note": "right"}


async def ones(args: Any, samples: list[Sample]) -> list[float]:
    return [1.0 for _ in samples]


def response(length: int, status: Sample.Status = Sample.Status.COMPLETED) -> Sample:
    return Sample(index=0, group_index=0, tokens=[1] * (length + 1), response_length=length, status=status)


def scored(sample: Sample, evaluation: bool = False, **values: Any) -> Sample:
    asyncio.run(score_sample(args(**values), sample, evaluation=evaluation))
    return sample


@pytest.mark.parametrize(("length", "reward"), [(1, 1.0), (80, 1.0), (90, 0.75), (100, 0.5), (130, 0.5)])
def test_the_reward_falls_over_the_last_tokens_before_the_limit(length: int, reward: float) -> None:
    assert scored(response(length)).reward == pytest.approx(reward)


@given(length=st.integers(0, 300), limit=st.integers(1, 200), part=st.floats(0.01, 1), largest=st.floats(0.01, 10))
def test_a_penalty_only_grows_with_the_length_and_is_bounded(length: int, limit: int, part: float, largest: float):
    buffer = max(1, int(limit * part))
    found = overlong_penalty(length, limit, buffer, largest)
    assert -largest <= overlong_penalty(length + 1, limit, buffer, largest) <= found <= 0
    assert (found == 0) == (length <= limit - buffer)
    assert overlong_penalty(limit, limit, buffer, largest) == pytest.approx(-largest)


def test_metrics_show_the_reward_as_it_was_and_evaluations_have_no_penalty() -> None:
    sample = scored(response(100))
    assert rollout_metrics([[sample]], args())["rollout/raw_reward"] == 1.0
    assert scored(response(100), evaluation=True).reward == 1.0


def test_dict_rewards_and_groups_that_are_scored_together() -> None:
    sample = scored(response(100), custom_rm_path=f"{__name__}.graded", reward_key="score")
    assert sample.reward == {"score": 0.5, "note": "right"} and sample.metadata["raw_reward"] == 1.0
    group = [response(80), response(100)]
    asyncio.run(score_group(args(custom_rm_path=f"{__name__}.ones"), group))
    assert [sample.reward for sample in group] == [1.0, 0.5]


def test_the_mask_takes_out_what_was_cut_off_and_nothing_else() -> None:
    statuses = (Sample.Status.TRUNCATED, Sample.Status.COMPLETED)
    removed = [scored(response(9, status), overlong_mask=True, overlong_buffer_len=None) for status in statuses]
    assert [sample.remove_sample for sample in removed] == [True, False]
    assert [sample.reward for sample in removed] == [1.0, 1.0]
    cut = response(9, Sample.Status.TRUNCATED)
    assert not scored(cut, evaluation=True, overlong_mask=True).remove_sample


async def solve(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generates, and sets the reward itself."""
    sample.tokens, sample.response_length = [1] * 101, 100
    sample.reward, sample.status = 1.0, Sample.Status.TRUNCATED
    return sample


async def solve_all(args: Any, samples: list[Sample]) -> list[Sample]:
    return [await solve(args, sample, {}) if sample.reward is None else sample for sample in samples]


RULES = {
    "overlong_buffer_len": 20, "overlong_penalty": 0.5, "overlong_mask": True, "rollout_max_response_len": LIMIT
}  # fmt: skip


def test_a_generate_function_that_sets_rewards_is_held_to_the_rules_once(
    engine: Any, make_state: Callable[..., RolloutState]
) -> None:
    state = make_state(engine, custom_generate_function_path=f"{__name__}.solve", **RULES)

    def generated(evaluation: bool = False) -> Sample:
        sample = Sample(index=0, group_index=0, prompt="1")
        # A sample that has its reward already is left as it is.
        for _ in range(2):
            state.loop.run(generate_and_rm(state.args, sample, dict(state.sampling_params), evaluation), timeout=60)
        return sample

    sample = generated()
    assert sample.reward == 0.5 and sample.metadata["raw_reward"] == 1.0 and sample.remove_sample
    assert generated(evaluation=True).reward == 1.0


def test_a_function_that_generates_whole_groups_is_held_to_the_rules_too(
    engine: Any, make_state: Callable[..., RolloutState]
) -> None:
    state = make_state(engine, custom_generate_function_path=f"{__name__}.solve_all", **RULES)
    kept = Sample(index=0, group_index=0, tokens=[1] * 101, response_length=100, reward=0.5, metadata={"raw_reward": 1})
    kept.status = Sample.Status.COMPLETED
    group = [kept, Sample(index=1, group_index=0, prompt="1")]
    answer = state.loop.run(generate_and_rm_group(state.args, group, dict(state.sampling_params)), timeout=60)
    assert [sample.reward for sample in answer] == [0.5, 0.5]


def test_groups_of_right_answers_are_dropped_whatever_their_lengths() -> None:
    group = [scored(response(length)) for length in (10, 100)]
    assert not check_reward_nonzero_std(args(), group).keep
    assert check_reward_nonzero_std(args(overlong_buffer_len=None), group).keep


def test_a_buffer_longer_than_a_response_and_a_penalty_without_one_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="--overlong-buffer-len must be at most --rollout-max-response-len 1024"):
        RolloutSettings(hf_checkpoint="m", overlong_buffer_len=2000)
    with pytest.raises(InvalidSetting, match="--overlong-penalty 2 requires --overlong-buffer-len"):
        RolloutSettings(hf_checkpoint="m", overlong_penalty=2.0)
