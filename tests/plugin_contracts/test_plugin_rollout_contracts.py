"""--rollout-function-path, --eval-function-path, --data-source-path: what they are called with, what they may answer.

python tests/plugin_contracts/test_plugin_rollout_contracts.py [--rollout-function-path PATH]
    [--eval-function-path PATH] [--data-source-path PATH]
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import seed_plugins
from contract_runs import check_sample, checkpoint, engine, main, running, users
from slime.types import Sample
from slime.types.errors import InvalidField, PluginError

NUM_GPUS = 0

__all__ = ["checkpoint", "engine"]

DEFAULT = "slime.rollout.sglang_rollout.generate_rollout"


@pytest.fixture
def run(checkpoint, engine, tmp_path):
    """run(settings...): a context in which rollouts are made."""
    seed_plugins.CALLS.clear()
    return lambda **settings: running(checkpoint, engine, tmp_path, **settings)


ROLLOUTS = ["rollout_of_groups", "rollout_as_a_plain_list"]


@pytest.mark.parametrize(
    "path", [DEFAULT, *(f"seed_plugins.{name}" for name in ROLLOUTS), *users("--rollout-function-path")]
)
def test_a_rollout_function_hands_in_finished_groups(run, path: str) -> None:
    with run(rollout_function_path=path) as service:
        groups = service.generate(groups=3)
        assert 0 < len(groups) <= 3
        for sample in (sample for group in groups for sample in group):
            check_sample(sample)
        assert "leased" not in service.states, "what was not completed goes back"


def test_it_is_called_with_the_settings_and_its_metrics_are_kept(run) -> None:
    with run(rollout_function_path="seed_plugins.rollout_of_groups") as service:
        service.generate(groups=2, rollout_id=5)
        assert ("rollout", 5, False) in seed_plugins.CALLS and service.metrics["rollout/raw_reward"] == 1.0


def test_segments_of_a_rollout_may_be_nested(run) -> None:
    with run(rollout_function_path="seed_plugins.rollout_of_segments") as service:
        (group, _) = service.generate(groups=2)
        assert [sample.rollout_id for sample in group] == [0, 0, 1, 1]
        assert [sample.reward for sample in group] == [0, 0, 1, 1] and {sample.group_index for sample in group} == {0}


def test_segments_without_a_rollout_id_are_refused(run) -> None:
    with run(rollout_function_path="seed_plugins.rollout_of_segments_without_ids") as service:
        with pytest.raises(InvalidField, match="rollout_id"):
            service.generate()
        assert "leased" not in service.states


def test_what_a_function_leaves_out_is_generated_later(run) -> None:
    with run(rollout_function_path="seed_plugins.rollout_that_drops_some") as service:
        assert len(service.generate(groups=4)) == 2
        assert len(service.generate(groups=4, rollout_id=1)) == 4 and "leased" not in service.states


def test_another_answer_is_an_error_that_names_the_flag(run) -> None:
    with run(rollout_function_path="seed_plugins.rollout_of_numbers") as service:
        with pytest.raises(PluginError, match="--rollout-function-path seed_plugins.rollout_of_numbers: answered int"):
            service.generate()


@pytest.mark.parametrize("flag", ["rollout_function_path", "eval_function_path"])
def test_a_function_that_cannot_be_called_is_refused_before_the_run(run, flag: str) -> None:
    with pytest.raises(PluginError, match="evaluation=") as caught:
        with run(**{flag: "seed_plugins.rollout_without_evaluation"}):
            pass
    assert caught.value.field == "--" + flag.replace("_", "-")


@pytest.mark.parametrize("name", ["evaluation_output", "evaluation_as_a_dict"])
def test_an_evaluation_function_answers_sets(run, name: str) -> None:
    with run(eval_function_path=f"seed_plugins.{name}") as service:
        metrics = service.evaluate(rollout_id=7)
        assert metrics["eval/mine"] == 0.5 and metrics["eval/mine-truncated_ratio"] == 0.5
        assert seed_plugins.CALLS == [("evaluation", 7, True)]
        assert ("eval/extra" in metrics) == (name == "evaluation_output")


@pytest.mark.parametrize("path", [DEFAULT, *users("--eval-function-path")])
def test_an_evaluation_stores_nothing(run, path: str) -> None:
    with run(eval_function_path=path) as service:
        assert any(name.startswith("eval/") for name in service.evaluate())
        assert "completed" not in service.states and "leased" not in service.states


@pytest.mark.parametrize("path", ["seed_plugins.OwnPrompts", *users("--data-source-path")])
def test_a_data_source_of_a_user_gives_the_prompts(run, path: str) -> None:
    with run(data_source_path=path) as service:
        groups = service.generate(groups=3)
        assert len(groups) == 3 and "leased" not in service.states
        for sample in (sample for group in groups for sample in group):
            check_sample(sample)


def test_a_data_source_goes_on_where_it_was(run) -> None:
    with run(data_source_path="seed_plugins.OwnPrompts") as service:
        assert [group[0].prompt for group in service.generate(groups=2)] == ["000>", "001>"]
        assert [group[0].prompt for group in service.generate(groups=2, rollout_id=1)][2:] == ["002>", "003>"]


@pytest.mark.parametrize("name", ["FlatPrompts", "BestFirst"])
def test_a_data_source_of_single_samples_gives_the_prompts(run, name: str) -> None:
    """Its class takes a data set and the settings, and need not call the one that it is made from."""
    with run(data_source_path=f"seed_plugins.{name}", rm_type="random") as service:
        groups = service.generate(groups=2)
        assert [[sample.prompt for sample in group] for group in groups] == [["000>"] * 2, ["001>"] * 2]


def test_a_data_source_of_single_samples() -> None:
    dataset = SimpleNamespace(sample=lambda count: ["001>", "002>"][:count])
    source = seed_plugins.FlatPrompts(dataset, SimpleNamespace())
    assert [sample.prompt for sample in source.get_samples(2)] == ["001>", "002>"]
    assert source.add_samples([Sample()]) is None


def test_a_filter_that_is_a_method_chooses_among_what_came_back() -> None:
    source = seed_plugins.BestFirst(["003>", "004>"], SimpleNamespace())
    source.add_samples([Sample(prompt=f"00{i}>", reward=float(i)) for i in range(3)])
    assert [sample.prompt for sample in source.get_samples(2)] == ["002>", "001>"]
    assert [sample.prompt for sample in source.get_samples(2)] == ["000>", "003>"], "each once, then new ones"


if __name__ == "__main__":
    sys.exit(main(__file__, sys.argv[1:]))
