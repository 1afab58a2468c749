"""Metrics of a rollout from the summaries of its samples: the same as from the samples themselves."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.buffer.groups.summaries import encode_summaries
from slime.launcher.metrics.sealed import MetricsInProgress, sealed_metrics, staleness_metrics, step_metrics
from slime.launcher.services.supervisor import Supervisor
from slime.rollout.metrics import rollout_metrics
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.clients.buffer import SealedStep
from slime.types.codec import sample_to_proto
from slime.v1 import buffer_pb2

ARGS = SimpleNamespace(
    custom_rollout_log_function_path=None,
    fully_async=False,
    dynamic_sampling_filter_path=None,
    log_passrate=True,
    log_multi_turn=True,
    log_correct_samples=True,
    log_reward_category="why",
    rollout_max_response_len=8,
    reward_key=None,
    rollout_function_path="my.own.rollout",
)


def sealed(groups: list[list[Sample]], **extra: dict) -> SealedStep:
    messages = [
        summary
        for group in groups
        for summary in buffer_pb2.SealStepResponse.FromString(
            encode_summaries([sample_to_proto(sample) for sample in group], group)
        ).samples
    ]
    return SealedStep(messages, extra.get("metrics", {}), extra.get("rejected", {}))


def group(index: int, rewards: list[float], lengths: list[int], versions: list[str]) -> list[Sample]:
    return [
        Sample(
            group_index=index, index=index * 8 + position, tokens=[1] * (length + 1), response_length=length,
            reward=reward, status=Sample.Status.TRUNCATED if length > 3 else Sample.Status.COMPLETED,
            weight_versions=versions,
        )
        for position, (reward, length) in enumerate(zip(rewards, lengths, strict=False))
    ]  # fmt: skip


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4),
            st.lists(st.integers(1, 6), min_size=4, max_size=4),
            st.lists(st.sampled_from(["0", "3", "12"]), max_size=2),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_summaries_tell_what_the_samples_tell(drawn: list[tuple[list[float], list[int], list[str]]]) -> None:
    groups = [group(index, *parts) for index, parts in enumerate(drawn)]
    assert sealed_metrics(sealed(groups), ARGS) == rollout_metrics(groups, ARGS)


def test_what_was_measured_while_the_groups_were_made_is_kept_and_rejections_are_counted_over_all_starts() -> None:
    groups = [group(0, [0.0, 1.0], [1, 2], ["0"])]
    step = sealed(
        groups,
        metrics={"perf/rollout_time": 2.0, "rollout/raw_reward": 9.0, "rollout/prompt_too_long": 0.0},
        rejected={"zero_std": 3, "prompt_too_long": 2},
    )
    filtered = SimpleNamespace(**{**vars(ARGS), "dynamic_sampling_filter_path": "a.b"})
    metrics = sealed_metrics(step, filtered)
    assert (metrics["perf/rollout_time"], metrics["rollout/raw_reward"]) == (2.0, 0.5)
    assert (metrics["rollout/prompt_too_long"], metrics["rollout/dynamic_filter/drop_zero_std"]) == (2.0, 3.0)
    own = SimpleNamespace(**{**vars(ARGS), "custom_rollout_log_function_path": "a.b"})
    assert sealed_metrics(step, own) == step.metrics


def test_a_rollout_that_ended_before_it_could_tell_has_the_columns_of_one_that_told() -> None:
    default = SimpleNamespace(**{**vars(ARGS), "rollout_function_path": RolloutSettings.rollout_function_path})
    groups = [group(0, [0.0, 1.0], [1, 2], ["0"])]
    told = {"rollout/prompt_too_long": 0.0, "rollout/aborted_groups": 0.0}
    assert sealed_metrics(sealed(groups), default) == sealed_metrics(sealed(groups, metrics=told), default)


@pytest.mark.parametrize("raw", ["high", None, math.nan, {"a": 1}])
def test_what_a_client_calls_the_raw_reward_breaks_no_metric(raw):
    samples = group(0, [1.0, 0.0], [1, 1], [])
    for sample in samples:
        sample.metadata = {"raw_reward": raw}
    assert sealed_metrics(sealed([samples]), ARGS)["rollout/raw_reward"] == 0.5


def test_rewards_that_are_objects_without_a_number_are_left_out_of_the_metrics():
    samples = group(0, [1.0, 0.0], [1, 1], [])
    samples[0].reward = {"score": "high"}
    assert sealed_metrics(sealed([samples]), ARGS)["rollout/raw_reward"] == 0.0


def test_weights_that_a_run_lost_are_not_newer_than_the_trainer() -> None:
    assert staleness_metrics(6, [8, 6, 4, -1]) == {"rollout/staleness": 2 / 3, "rollout/staleness/max": 2.0}
    assert staleness_metrics(6, [-1]) == {}


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", start_seconds=300, stop_seconds=10)
    yield supervisor
    supervisor.stop()


class HeldStep(SealedStep):
    """A step whose summaries are read once `released` is set."""

    def __init__(self, step: SealedStep) -> None:
        super().__init__(step._messages, step.metrics, step.rejected)
        self.released = threading.Event()

    def __iter__(self) -> Iterator:
        assert self.released.wait(60)
        return super().__iter__()


def test_the_metrics_of_a_step_are_computed_while_it_is_trained_on(supervisor: Supervisor) -> None:
    step = sealed([group(0, [0.0, 1.0], [1, 2], ["3"]), group(1, [1.0], [6], ["2"])])
    held, metrics = HeldStep(step), MetricsInProgress(supervisor, ARGS)
    metrics.begin(4, held, staleness=True)
    # The training begins although nothing was computed yet.
    supervisor.call(held.released.set)
    assert metrics.take(4) == step_metrics(4, step, ARGS, staleness=True)
    assert metrics.take(4) == {}


def test_metrics_that_are_waited_for_are_computed_at_once(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.launcher.services.beside_training.HEAD_START_SECONDS", 3600)
    step, metrics = sealed([group(0, [1.0], [1], [])]), MetricsInProgress(supervisor, ARGS)
    metrics.begin(0, step, staleness=False)
    assert metrics.take(0)["rollout/raw_reward"] == 1.0


def test_a_step_that_is_sealed_again_has_the_metrics_of_its_new_groups(supervisor: Supervisor) -> None:
    metrics = MetricsInProgress(supervisor, ARGS)
    for groups in ([group(0, [0.0], [1], [])], [group(1, [1.0], [2], [])]):
        metrics.begin(0, sealed(groups), staleness=False)
    assert metrics.take(0)["rollout/raw_reward"] == 1.0


def test_metrics_that_cannot_be_computed_end_the_run(supervisor: Supervisor) -> None:
    metrics = MetricsInProgress(supervisor, SimpleNamespace(custom_rollout_log_function_path=None))
    metrics.begin(0, sealed([group(0, [0.0], [1], [])]), staleness=False)
    with pytest.raises(AttributeError, match="log_passrate|reward_key"):
        metrics.take(0)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), min_size=1, max_size=12))
def test_deviations_of_groups_have_the_bits_of_numpy_for_each(rewards: list[list[float]]) -> None:
    groups = [
        [Sample(group_index=index, index=position, reward=value) for position, value in enumerate(values)]
        for index, values in enumerate(rewards)
    ]
    metrics = rollout_metrics(groups, ARGS)
    assert metrics["rollout/reward_std"] == float(np.mean([np.std(values) for values in rewards]))
    several = [values for values in rewards if len(values) > 1]
    equal = sum(max(values) - min(values) <= 1e-6 for values in several)
    assert metrics["rollout/zero_std_ratio"] == (equal / len(several) if several else 0.0)
