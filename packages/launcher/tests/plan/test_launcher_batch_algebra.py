"""Batches predicted before a run are those that the trainer makes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.launcher.plan.batches import Batches, longest_sample
from slime.rollout.settings.rollout import RolloutSettings
from slime.trainer.batching.schedule import Lengths, schedule

SMALL = st.integers(1, 6)


@given(st.integers(1, 40), SMALL, SMALL, st.integers(1, 3))
def test_forward_passes_are_those_of_the_trainer(samples: int, replicas: int, size: int, multiple: int) -> None:
    said = Batches(samples, 1, samples, 1, replicas).passes(size, multiple)
    cut = schedule(range(samples), Lengths([7] * samples), replicas, multiple=multiple, micro_batch_size=size)
    assert {len(share) for share in cut} == {said}
    filled = schedule(range(samples), Lengths([7] * samples), replicas, multiple=multiple, max_tokens=7 * size + 6)
    assert {len(share) for share in filled} == {said}


@pytest.mark.parametrize(
    ("settings", "tokens", "because"),
    [
        ({}, 20, "--rollout-max-response-len 20, without the prompt"),
        ({"rollout_max_response_len": 80}, 64, "max_position_embeddings 64"),
        ({"rollout_max_prompt_len": 10}, 30, "--rollout-max-prompt-len 10 + --rollout-max-response-len 20"),
        ({"rollout_max_prompt_len": 60}, 64, "max_position_embeddings 64"),
        ({"rollout_max_context_len": 50}, 50, "--rollout-max-context-len 50"),
        ({"rollout_max_context_len": 50, "rollout_max_prompt_len": 10}, 30, "--rollout-max-prompt-len 10"),
        ({"rollout_max_context_len": 50, "rollout_max_prompt_len": 40}, 50, "--rollout-max-context-len 50"),
    ],
)
def test_the_longest_sample_is_what_can_come(settings: dict[str, Any], tokens: int, because: str) -> None:
    rollout = RolloutSettings(**{"hf_checkpoint": "m", "rollout_max_response_len": 20} | settings)
    found, why = longest_sample(rollout, {"max_position_embeddings": 64})
    assert found == tokens and because in why
