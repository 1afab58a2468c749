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


def test_frozen_weights_are_exported_as_their_files_have_them(results: dict[str, Any]):
    first, second = results["export"]
    assert first == ["no error", [0, 1], True]
    assert second == ["no error", [0, 1]]
