"""Evaluation sets with settings of their own."""

from __future__ import annotations

import pytest

from slime.rollout.settings.eval_overrides import check_overrides
from slime.types.errors import InvalidSetting


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"a": {"temprature": 0}}, "did you mean temperature"),
        ({"a": {"temperature": -1}}, "a.temperature must be a number, at least 0, got -1"),
        ({"a": {"top_k": 1.5}}, "a.top_k must be an integer, .*got 1.5"),
        ({"a": {"temperature": float("inf")}}, "a.temperature must be .*, got inf"),
        ({"a": {"n_samples_per_eval_prompt": float("inf")}}, "a.n_samples_per_eval_prompt must be .*, got inf"),
        ({"a": {"n_samples_per_eval_prompt": 10**30}}, "a.n_samples_per_eval_prompt must be .*, got 10"),
        ({"a": {"max_response_len": True}}, "a.max_response_len must be .*, got True"),
        ({"a": {"stop": "END"}}, "a.stop must be a list of texts, got 'END'"),
        ({"a": {"stop_token_ids": [-1]}}, "a.stop_token_ids must be a list of token ids, got \\[-1\\]"),
        ({"a": {"rm_type": 3}}, "a.rm_type must be the name"),
        ({"a": {"repetition_penalty": 0}}, "a.repetition_penalty must be a number, more than 0, got 0"),
        ({"a": {"apply_chat_template": 1}}, "a.apply_chat_template must be true or false, got 1"),
        ({"a": {"metadata_overrides": [1]}}, "a.metadata_overrides must be a mapping of metadata, got \\[1\\]"),
        ({"a": {"min_eval_samples": 0}}, "a.min_eval_samples must be an integer, at least 1, got 0"),
        ({"a": 3}, "a must be a mapping of settings, got 3"),
    ],
)
def test_wrong_overrides_name_set_and_key(overrides, words):
    with pytest.raises(InvalidSetting, match=words):
        check_overrides(overrides)
