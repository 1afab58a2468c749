"""Functions that are called while a run goes on: rewards, filters, hooks of samples, logs, and the buffer's filter.

python tests/plugin_contracts/test_plugin_runtime_hook_contracts.py [--custom-rm-path PATH] [--buffer-filter-path PATH]
    [--dynamic-sampling-filter-path PATH] [--rollout-sample-hook-path PATH] [--rollout-sample-filter-path PATH]
    [--rollout-all-samples-process-path PATH] [--custom-rollout-log-function-path PATH]
    [--custom-eval-rollout-log-function-path PATH] [--custom-reward-post-process-path PATH]
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import seed_plugins
from contract_runs import check_sample, checkpoint, engine, main, running, users
from slime.buffer.filters import BufferFilter
from slime.rollout.calls.outputs import flatten
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.trainer.backends.megatron.hooks import Hooks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample
from slime.types.errors import InvalidField, PluginError
from slime.types.plugins import load_plugin

NUM_GPUS = 0

__all__ = ["checkpoint", "engine"]


@pytest.fixture
def run(checkpoint, engine, tmp_path):
    """run(settings...): a context in which rollouts are made."""
    seed_plugins.CALLS.clear()
    return lambda **settings: running(checkpoint, engine, tmp_path, **settings)


def samples(service, groups: int = 2) -> list[Sample]:
    return flatten(service.generate(groups))


# Rewards


@pytest.mark.parametrize("path", ["seed_plugins.reward_func", *users("--custom-rm-path")])
def test_a_reward_of_one_sample(run, path: str) -> None:
    with run(rm_type=None, custom_rm_path=path) as service:
        for sample in samples(service):
            check_sample(sample)
        assert service.evaluate().keys() >= {"eval/held_out"}


def test_a_group_is_scored_at_once(run) -> None:
    with run(rm_type=None, custom_rm_path="seed_plugins.batched_custom_rm", group_rm=True) as service:
        assert [sample.reward for sample in samples(service)] == [0.5, 0.75] * 2
        assert seed_plugins.CALLS == [("batched", 2)] * 2


def test_segments_are_scored_at_once(run) -> None:
    functions = {"custom_rm_path": "seed_plugins.batched_custom_rm"}
    functions["custom_generate_function_path"] = "seed_plugins.generate_segments"
    with run(rm_type=None, **functions) as service:
        assert [sample.reward for sample in samples(service, 1)] == [0.5] * 3 + [0.75] * 3
        assert seed_plugins.CALLS == [("batched", 3)] * 2


@pytest.mark.parametrize(("group_rm", "reward"), [(False, 1.0), (True, 0.5)])
def test_a_file_with_a_function_for_each_shape(run, tmp_path, group_rm: bool, reward: float) -> None:
    file = tmp_path / "custom_rm.py"
    file.write_text(
        "from slime.data import Sample\n"
        "async def reward_func(args, sample: Sample, **kwargs) -> float:\n"
        "    return 1.0 if sample.response.strip() == sample.label.strip() else 0.0\n"
        "async def batched_custom_rm(args, samples: list[Sample]) -> list[float]:\n"
        "    return [await reward_func(args, sample) - 0.5 for sample in samples]\n"
    )
    with run(rm_type=None, custom_rm_path=str(file), group_rm=group_rm) as service:
        assert {sample.reward for sample in samples(service)} == {reward}


def test_a_reward_of_several_numbers(run) -> None:
    with run(rm_type=None, custom_rm_path="seed_plugins.reward_dict", reward_key="score") as service:
        assert {sample.reward["score"] for sample in samples(service)} == {2}
    with run(rm_type=None, custom_rm_path="seed_plugins.reward_dict") as service:
        with pytest.raises(InvalidField, match="--reward-key"):
            service.generate()


def test_a_reward_for_each_sample_of_a_group(run) -> None:
    with run(rm_type=None, custom_rm_path="seed_plugins.too_few_rewards", group_rm=True) as service:
        with pytest.raises(InvalidField, match="returned 1 reward, expected a list of 2 rewards"):
            service.generate()


# Filters and hooks of samples


@pytest.mark.parametrize(("name", "reason"), [("drop_odd", "odd"), ("keep_even", "filtered")])
def test_a_filter_drops_groups_and_others_take_their_place(run, name: str, reason: str) -> None:
    with run(dynamic_sampling_filter_path=f"seed_plugins.{name}") as service:
        groups = service.generate(groups=3)
        assert [group[0].group_index for group in groups] == [0, 2, 4]
        assert service.metrics[f"rollout/dynamic_filter/drop_{reason}"] >= 2


def test_a_filter_that_would_leave_the_rollout_short(run) -> None:
    with run(dynamic_sampling_filter_path="seed_plugins.drop_all_but_fall_back") as service:
        assert len(service.generate(groups=3)) == 3


@pytest.mark.parametrize("path", users("--dynamic-sampling-filter-path"))
def test_a_users_filter_answers_whether_to_keep(path: str) -> None:
    function = load_plugin(path, flag="--dynamic-sampling-filter-path")
    args = SimpleNamespace(reward_key=None, n_samples_per_prompt=2)
    for rewards in ((0.0, 1.0), (1.0, 1.0)):
        group = [Sample(index=i, group_index=0, reward=reward) for i, reward in enumerate(rewards)]
        answer = function(args, group)
        assert isinstance(answer, (bool, DynamicFilterOutput)), type(answer)


@pytest.mark.parametrize("path", ["seed_plugins.hook_in_place", *users("--rollout-sample-hook-path")])
def test_a_hook_sees_each_sample_before_its_reward(run, path: str) -> None:
    with run(rollout_sample_hook_path=[path]) as service:
        for sample in samples(service):
            check_sample(sample)
            if path.startswith("seed_plugins"):
                assert sample.metadata["hooked"] == [0, False, None]


def test_hooks_are_called_in_turn_and_may_replace_the_sample(run) -> None:
    paths = ["seed_plugins.hook_in_place", "seed_plugins.hook_that_replaces"]
    with run(rollout_sample_hook_path=paths) as service:
        for sample in samples(service):
            assert sample.metadata["replaced"] is False and "hooked" in sample.metadata and sample.reward == 1.0


def test_a_hook_answers_a_sample_or_nothing(run) -> None:
    with run(rollout_sample_hook_path=["seed_plugins.hook_that_answers_text"]) as service:
        with pytest.raises(PluginError, match="answered str, expected a Sample or None"):
            service.generate()


@pytest.mark.parametrize("path", ["seed_plugins.remove_first_of_each", *users("--rollout-sample-filter-path")])
def test_a_filter_of_samples_takes_some_out_of_the_loss(run, path: str) -> None:
    with run(rollout_sample_filter_path=path) as service:
        groups = service.generate(groups=2)
        assert len(groups) == 2
        if path.startswith("seed_plugins"):
            assert [[sample.remove_sample for sample in group] for group in groups] == [[True, False]] * 2


@pytest.mark.parametrize("path", ["seed_plugins.look_at_all", *users("--rollout-all-samples-process-path")])
def test_all_groups_are_shown_dropped_ones_too(run, path: str) -> None:
    functions = {"rollout_all_samples_process_path": path, "dynamic_sampling_filter_path": "seed_plugins.drop_odd"}
    with run(**functions) as service:
        assert len(service.generate(groups=2)) == 2 and "leased" not in service.states
        if path.startswith("seed_plugins"):
            ((_, shown),) = seed_plugins.CALLS
            assert shown >= 3


# Logs


@pytest.mark.parametrize("path", ["seed_plugins.log_and_go_on", *users("--custom-rollout-log-function-path")])
def test_a_log_of_a_rollout(run, path: str) -> None:
    with run(custom_rollout_log_function_path=path) as service:
        service.generate(groups=2, rollout_id=3)
        if path.startswith("seed_plugins"):
            assert seed_plugins.CALLS == [("log", 3, 4, True)] and "rollout/raw_reward" in service.metrics


def test_a_true_answer_takes_the_place_of_the_metrics(run) -> None:
    with run(custom_rollout_log_function_path="seed_plugins.log_and_stop") as service:
        service.generate()
        assert "rollout/raw_reward" not in service.metrics


@pytest.mark.parametrize("path", ["seed_plugins.log_evaluation", *users("--custom-eval-rollout-log-function-path")])
def test_a_log_of_an_evaluation(run, path: str) -> None:
    with run(custom_eval_rollout_log_function_path=path) as service:
        metrics = service.evaluate(rollout_id=4)
        if path.startswith("seed_plugins"):
            assert seed_plugins.CALLS == [("eval_log", 4, ["held_out"])] and "eval/held_out" not in metrics


# The buffer's filter


def test_a_filter_chooses_among_the_groups_that_wait(run) -> None:
    with run(buffer_filter_path="seed_plugins.newest_first") as service:
        service.buffer.add_prompts([{"prompt": f"{i}>", "label": str(i)} for i in range(4)])
        groups = service.generate(groups=2)
        assert {call[:2] for call in seed_plugins.CALLS} == {("filter", None)}, "no rollout has a number there"
        assert [group[0].prompt for group in groups] == ["2>", "3>"]


def test_it_must_remove_what_it_returns(run) -> None:
    with run(buffer_filter_path="seed_plugins.leaves_what_it_returns") as service:
        service.buffer.add_prompts([{"prompt": "1>", "label": "1"}])
        with pytest.raises(PluginError, match="must remove the groups that it returns"):
            service.generate(groups=1)


@pytest.mark.parametrize("path", users("--buffer-filter-path"))
def test_a_users_filter_of_the_buffer(path: str) -> None:
    groups = [[Sample(group_index=g, index=2 * g + i, reward=float(g)) for i in range(2)] for g in range(6)]
    for count in (1, 3, 6):
        choice = BufferFilter(path, SimpleNamespace(reward_key=None)).choose(groups, count)
        assert len(choice.chosen) <= count and not choice.chosen.keys() & set(choice.dropped)


# Rewards for the trainer


@pytest.mark.parametrize("path", ["seed_plugins.centre", *users("--custom-reward-post-process-path")])
def test_rewards_for_the_trainer(path: str) -> None:
    flag = "--custom-reward-post-process-path"
    function = load_plugin(path, flag=flag)
    args = SimpleNamespace(reward_key=None, n_samples_per_prompt=2, rollout_batch_size=2, advantage_estimator="grpo")
    made = [Sample(group_index=i // 2, index=i, rollout_id=i, reward=float(i % 2)) for i in range(4)]
    raw, rewards = function(args, made)
    assert len(raw) == len(rewards) == 4 and all(float(reward) == reward for reward in [*raw, *rewards])


# Hooks of Megatron


def trainer_settings(**paths: str) -> TrainerSettings:
    return TrainerSettings(hf_checkpoint="none", train_backend="megatron", **paths)


def test_hooks_are_called_with_what_their_contracts_say() -> None:
    seed_plugins.CALLS.clear()
    settings = trainer_settings(
        custom_megatron_init_path="seed_plugins.megatron_init",
        custom_megatron_before_log_prob_hook_path="seed_plugins.before_log_prob",
        custom_megatron_before_train_step_hook_path="seed_plugins.before_train_step",
        custom_model_provider_path="seed_plugins.model_provider",
    )
    hooks = Hooks(settings, SimpleNamespace(seed=7))
    hooks.after_initialization()
    hooks.before_log_probs(["chunk"], "ref_")
    hooks.before_train_step(3, 1, ["chunk"], "optimizer")
    assert seed_plugins.CALLS == [
        ("init", 7),
        ("log_prob", ["chunk"], "ref_"),
        ("train_step", 3, 1, ["chunk"], "optimizer"),
    ]
    assert hooks.model_provider(pre_process=True, post_process=False) == (True, False)


def test_a_provider_of_another_form_is_refused() -> None:
    settings = trainer_settings(custom_model_provider_path="seed_plugins.provider_of_another_form")
    with pytest.raises(PluginError, match="pre_process=, post_process="):
        Hooks(settings)


if __name__ == "__main__":
    sys.exit(main(__file__, sys.argv[1:]))
