"""Evaluation sets with prompts that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rollout_fakes import FakeBuffer, FakeEngine, prompt_groups

from slime.rollout.generate.evaluation import eval_rollout
from slime.rollout.generate.state import RolloutState
from slime.rollout.sources import EvaluationSource
from slime.types.errors import InvalidField


def test_a_prompt_that_cannot_be_used_costs_its_row_alone(
    engine: FakeEngine, make_state: Callable[..., RolloutState]
) -> None:
    groups = [*prompt_groups(2, 1), *prompt_groups(1, 1, first=2, digits=9), *prompt_groups(1, 1, first=3)]
    groups[1].samples[0].prompt = ""
    state = make_state(engine)
    state.context_len = 9
    source = EvaluationSource(FakeBuffer([], evaluation={"set": groups}))
    output = state.loop.run(eval_rollout(state.args, 0, source), timeout=120)
    assert [sample.group_index for sample in output.data["set"]["samples"]] == [0, 3]
    assert len(output.data["set"]["rewards"]) == 2
    assert output.metrics == {"eval/set-prompt_unusable": 1, "eval/set-prompt_too_long": 1}


def test_messages_that_the_chat_template_refuses_cost_their_row_alone(
    engine: FakeEngine, make_state: Callable[..., RolloutState], monkeypatch: pytest.MonkeyPatch
) -> None:
    def alternating(tokenizer: Any, messages: list[dict[str, str]], **kwargs: Any) -> str:
        if len(messages) > 1:
            raise ValueError("roles must alternate")
        return messages[0]["content"]

    groups = prompt_groups(3, 1)
    groups[1].samples[0].prompt = [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]
    state = make_state(engine, apply_chat_template=True)
    monkeypatch.setattr(type(state.tokenizer), "apply_chat_template", alternating, raising=False)
    source = EvaluationSource(FakeBuffer([], evaluation={"set": groups}))
    output = state.loop.run(eval_rollout(state.args, 0, source), timeout=120)
    assert [sample.group_index for sample in output.data["set"]["samples"]] == [0, 2]
    assert output.metrics == {"eval/set-prompt_unusable": 1}


def test_a_set_without_any_usable_prompt_is_named(engine: FakeEngine, make_state: Callable[..., RolloutState]) -> None:
    groups = prompt_groups(2, 1)
    for group in groups:
        group.samples[0].prompt = ""
    state = make_state(engine)
    source = EvaluationSource(FakeBuffer([], evaluation={"held_out": groups}))
    with pytest.raises(InvalidField, match=r"evaluation set held_out: no prompt can be used; the last: .* has tokens"):
        state.loop.run(eval_rollout(state.args, 0, source), timeout=120)
