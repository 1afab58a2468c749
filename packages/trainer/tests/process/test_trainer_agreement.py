"""An error of one rank outside of a collective call is an error on all of them, and leaves none waiting."""

from pathlib import Path
from typing import Any

import pytest
from trainer_processes import results_of
from trainer_tiny import write_model

SCRIPT = str(Path(__file__).with_name("trainer_agreement.py"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = tmp_path_factory.mktemp("models")
    write_model(models / "dense")
    return results_of(SCRIPT, 2, tmp_path_factory.mktemp("ranks"), models)


@pytest.mark.parametrize(
    ("case", "failing", "words"),
    [
        ("unencodable", 0, "InvalidField: multimodal_train_inputs"),
        ("advantages", 1, "PluginError: --custom-advantage-function-path"),
        ("export-cut", 0, "model.safetensors: cut short"),
        ("export-cut-meanwhile", 0, "model.safetensors: "),
    ],
)
def test_ranks_fail_together_and_stay_in_step(results: dict[str, Any], case: str, failing: int, words: str):
    (own, in_step), (told, also_in_step) = results[case][failing], results[case][1 - failing]
    assert words in own and words in told
    assert f"rank {failing}: " in told and f"rank {failing}: " not in own
    assert in_step == also_in_step == [0, 1]


def test_every_rank_gets_values_of_any_size_in_the_fewest_exchanges(results: dict[str, Any]):
    assert results["long-and-short"] == [[[], [0, 1]]] * 2


def test_frozen_weights_are_exported_as_their_files_have_them(results: dict[str, Any]):
    first, second = results["export"]
    assert first == ["no error", [0, 1], True]
    assert second == ["no error", [0, 1]]


@pytest.mark.parametrize("kind", ["plugin", "other"])
def test_an_error_between_collective_calls_ends_the_other_rank_with_that_error(tmp_path: Path, kind: str):
    write_model(tmp_path / f"model-{kind}")
    script = str(Path(__file__).with_name("trainer_leaving.py"))
    told, own = results_of(script, 2, tmp_path, tmp_path / f"model-{kind}")["leaving"]
    error = {"plugin": "PluginError: no loss for these samples", "other": "MemoryError: full"}[kind]
    assert own[0] == error
    assert f"rank 1: {error}" in told[0]
    assert own[2] and told[2], "a rank that has left must be started again"
    # The ranks would wait for each other for two minutes.
    assert told[1] < 60
