"""Keys of an --eval-config file that a rollout service applies to one evaluation set alone."""

from __future__ import annotations

from typing import Any

import pytest

import example_plugins
from contract_runs import checkpoint, engine, running
from slime.types.errors import InvalidSetting

NUM_GPUS = 0

__all__ = ["checkpoint", "engine"]


@pytest.fixture
def evaluate(checkpoint, engine, tmp_path):
    def run(**own: Any) -> dict[str, float]:
        example_plugins.SEEN.clear()
        path = "example_plugins.reward_that_looks"
        with running(
            checkpoint, engine, tmp_path, custom_rm_path=path, rm_type=None, eval_overrides={"held_out": own}
        ) as service:
            service.generate(groups=1)
            example_plugins.SEEN.clear()
            return service.evaluate()

    return run


def test_sampling_parameters_of_a_set(evaluate, engine) -> None:
    evaluate(repetition_penalty=1.25, skip_special_tokens=True)
    trained, evaluated = engine.requests[0]["sampling_params"][0], engine.requests[-1]["sampling_params"][0]
    assert "repetition_penalty" not in trained and trained["skip_special_tokens"] is False
    assert evaluated["repetition_penalty"] == 1.25 and evaluated["skip_special_tokens"] is True


def test_the_chat_template_and_the_metadata_of_a_set(evaluate) -> None:
    evaluate(apply_chat_template=True, metadata_overrides={"difficulty": "hard"})
    assert {(rendered, difficulty) for _, rendered, difficulty in example_plugins.SEEN} == {(True, "hard")}


def test_a_set_of_too_few_samples_is_refused(evaluate) -> None:
    assert evaluate(min_eval_samples=4)["eval/held_out"] == 1.0
    with pytest.raises(InvalidSetting, match="held_out.min_eval_samples must be at most 4, the samples of the set"):
        evaluate(min_eval_samples=5)
