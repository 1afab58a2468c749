"""--custom-generate-function-path: for one sample or for all of a prompt, and what it may answer.

python tests/plugin_contracts/test_plugin_generate_contracts.py [--custom-generate-function-path PATH]
"""

from __future__ import annotations

import sys

import pytest

import seed_plugins
from contract_runs import check_sample, checkpoint, engine, main, running, users
from slime.types import Sample
from slime.types.errors import PluginError

NUM_GPUS = 0

__all__ = ["checkpoint", "engine"]

ONE_SAMPLE = [
    "generate_over_http",
    "generate_with_a_tool",
    "generate_segments",
    "generate_with_any_keywords",
    "generate_without_await",
    "generate_object",
]
BATCH = "seed_plugins.custom_generate"


@pytest.fixture
def run(checkpoint, engine, tmp_path):
    """run(PATH, settings...): a context in which rollouts are made."""
    seed_plugins.CALLS.clear()

    def with_function(path: str, **settings):
        return running(checkpoint, engine, tmp_path, custom_generate_function_path=path, max_turns=2, **settings)

    return with_function


@pytest.mark.parametrize(
    "path",
    [*(f"seed_plugins.{name}" for name in ONE_SAMPLE), BATCH, *users("--custom-generate-function-path")],
)
def test_the_samples_it_makes_can_be_trained_on(run, path: str) -> None:
    with run(path) as service:
        groups = service.generate(groups=3)
        assert len(groups) == 3 and "leased" not in service.states
        for group in groups:
            assert len(group) >= service.n_samples and {sample.group_index for sample in group} == {
                group[0].group_index
            }
            for sample in group:
                check_sample(sample)


@pytest.mark.parametrize("path", ["seed_plugins.generate_with_a_tool", *users("--custom-generate-function-path")])
def test_it_generates_for_evaluations_too(run, path: str) -> None:
    with run(path) as service:
        assert "eval/held_out" in service.evaluate()


def test_evaluation_is_passed_to_a_parameter_of_that_name_only(run) -> None:
    with run("seed_plugins.generate_with_a_tool") as service:
        service.generate(groups=1)
        service.evaluate()
        assert [call[1] for call in seed_plugins.CALLS] == [False] * 2 + [True] * 4
    seed_plugins.CALLS.clear()
    with run("seed_plugins.generate_with_any_keywords") as service:
        service.generate(groups=1)
        assert seed_plugins.CALLS == [("keywords", [])] * 2


def test_what_a_tool_says_is_not_trained_on(run) -> None:
    with run("seed_plugins.generate_with_a_tool") as service:
        (group,) = service.generate(groups=1)
        for sample in group:
            mask, log_probs = list(sample.loss_mask), sample.rollout_log_probs
            assert mask == [1, 1, 1, 1, 0, 0, 1, 1] and list(log_probs[4:6]) == [0, 0]


def test_segments_share_a_rollout_id_and_are_scored(run) -> None:
    with run("seed_plugins.generate_segments") as service:
        (group,) = service.generate(groups=1)
        assert [sample.rollout_id for sample in group] == [1000] * 3 + [1001] * 3
        assert {sample.reward for sample in group} == {1.0}


def test_the_shape_that_takes_all_samples_of_a_prompt(run) -> None:
    with run(BATCH, n_samples=3, rm_type=None) as service:
        groups = service.generate(groups=2)
        assert {sample.reward for group in groups for sample in group} == {0.25}, "it scores its samples itself"
        assert seed_plugins.CALLS == [("batch", 3, False)] * 2
        service.evaluate()
        assert seed_plugins.CALLS[-1] == ("batch", 1, True)


@pytest.mark.parametrize(("flag", "name"), [(None, "custom_generate.py"), ("reward_func", "tool_use.py")])
def test_a_file_with_helpers_beside_the_function(run, tmp_path, flag, name: str) -> None:
    function = "custom_generate" if flag is None else "generate"
    file = tmp_path / name
    file.write_text(
        "from slime.data import Sample\n"
        "def build_loss_mask(sample):\n    return [1] * sample.response_length\n"
        "def compute_reward(sample):\n    return 0.75\n"
        f"async def {function}(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:\n"
        "    for sample in samples:\n"
        "        sample.tokens, sample.response_length, sample.response = [2, 3, 1], 1, '1'\n"
        "        sample.loss_mask, sample.reward = build_loss_mask(sample), compute_reward(sample)\n"
        "        sample.status = Sample.Status.COMPLETED\n"
        "    return samples\n"
    )
    with run(str(file), rm_type=None) as service:
        assert {sample.reward for group in service.generate() for sample in group} == {0.75}


def test_the_function_that_a_sample_names_wins(checkpoint, engine, tmp_path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "from seed_plugins import OwnPrompts\n"
        "class Named(OwnPrompts):\n"
        "    def get_samples(self, n):\n"
        "        groups = super().get_samples(n)\n"
        "        for group in groups:\n"
        "            group[0].generate_function_path = 'seed_plugins.generate_without_await'\n"
        "        return groups\n"
    )
    with running(checkpoint, engine, tmp_path, data_source_path=f"{source}:Named") as service:
        (group,) = service.generate(groups=1)
        assert [sample.response for sample in group] == ["digits", "000"]


def test_another_answer_is_an_error_that_names_the_flag(run) -> None:
    with run("seed_plugins.generate_text") as service:
        with pytest.raises(
            PluginError, match="--custom-generate-function-path seed_plugins.generate_text: answered str"
        ):
            service.generate()


def test_a_function_of_another_shape_is_refused_before_the_run(run) -> None:
    with pytest.raises(PluginError, match="--custom-generate-function-path"):
        with run("seed_plugins.reward_dict.__name__"):
            pass
    with pytest.raises(PluginError, match=r"called with \(args, sample, sampling_params\[, evaluation=\]\) or \("):
        with run("os.getpid"):
            pass


def test_a_sample_has_what_such_functions_rely_on() -> None:
    sample = Sample(prompt="0>", tokens=[2, 3])
    assert (sample.response, sample.response_length, sample.reward, sample.loss_mask) == ("", 0, None, None)
    assert sample.status is Sample.Status.PENDING and sample.metadata == {} and sample.rollout_id is None
    restored = Sample.from_dict(sample.to_dict() | {"of_another_version": 3})
    assert restored.of_another_version == 3 and list(restored.tokens) == [2, 3]


if __name__ == "__main__":
    sys.exit(main(__file__, sys.argv[1:]))
