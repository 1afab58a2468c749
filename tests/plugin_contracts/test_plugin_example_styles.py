"""Plug-ins written like the original's examples, through a buffer, a rollout service and a training step."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_tiny import Runner, make_settings, write_model

import example_plugins
from contract_runs import check_sample, checkpoint, engine, running

NUM_GPUS = 0

__all__ = ["checkpoint", "engine"]


def here(name: str) -> str:
    return f"example_plugins.{name}"


@pytest.fixture
def run(checkpoint, engine, tmp_path):
    def with_settings(**settings: Any):
        return running(checkpoint, engine, tmp_path, **settings)

    return with_settings


def test_a_conversation_with_a_search_engine(run) -> None:
    functions = {
        "custom_generate_function_path": here("generate_with_search"), "custom_rm_path": here("reward_of_search"),
    }  # fmt: skip
    with run(**functions, rm_type=None, apply_chat_template=True) as service:
        for sample in (sample for group in service.generate(groups=2) for sample in group):
            check_sample(sample)
            assert sample.reward == 1.0 and sample.loss_mask.count(0) == 3
    assert len(example_plugins.Searcher().asked) >= 4


def test_a_reward_of_several_numbers(run) -> None:
    with run(custom_rm_path=here("reward_of_tools"), rm_type=None, reward_key="score") as service:
        samples = [sample for group in service.generate(groups=2) for sample in group]
        assert {(sample.reward["score"], sample.reward["acc"]) for sample in samples} == {(1.0, True)}


def test_several_solvers_of_a_prompt_are_samples_of_one_group(run) -> None:
    with run(custom_generate_function_path=here("generate_with_multi_agents")) as service:
        for group in service.generate(groups=2):
            assert sorted(sample.metadata["solver"] for sample in group) == [0, 0, 1, 1, 2, 2]
            for sample in group:
                check_sample(sample)
                assert sample.reward == 1.0


def test_a_boxed_answer_is_graded(run) -> None:
    with run(custom_rm_path=here("reward_of_geometry"), rm_type=None) as service:
        assert {sample.reward for group in service.generate(groups=1) for sample in group} == {1.0}


def test_a_rollout_function_with_the_main_loop_of_the_default_one(run) -> None:
    with run(rollout_function_path=here("generate_rollout_with_tasks"), over_sampling_batch_size=4) as service:
        groups = service.generate(groups=3)
        assert [group[0].group_index % 2 for group in groups] == [0, 0, 0]
        assert service.metrics["rollout/dynamic_filter/drop_odd"] >= 1
        assert "leased" not in service.states


def test_weights_of_a_mismatch_over_whole_sequences(tmp_path) -> None:
    path = here("compute_mis_weights_with_cp")
    settings = make_settings(write_model(tmp_path), use_tis=True, custom_tis_function_path=path)
    metrics = Runner(settings).run(0)
    assert metrics["train/grad_norm"] > 0 and 0 < metrics["train/mis_weight"] <= 2
