"""Prompts that begin alike: the embedded engine computes their common beginning once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.engines.embedded.dense import model as dense_module
from slime.rollout.engines.embedded.dense.model import DenseModel, Pass
from slime.rollout.engines.embedded.model.beginnings import BLOCK, Beginnings, fingerprints
from slime.rollout.engines.embedded.model.continuous import ContinuousBatch
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.response import Response

VOCABULARY = 300
EXAMPLES = [int(t) for t in np.random.default_rng(3).integers(2, VOCABULARY, 40)]
QUESTIONS = [[*EXAMPLES, *tail] for tail in ([5, 6], [5, 7, 8], [9], [9, 5, 6, 11, 12])]


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, initializer_range=0.3, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


class Counted(DenseModel):
    """Counts the tokens of each pass."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.passes: list[int] = []

    def forward(self, run: Pass, cache: Any) -> torch.Tensor:
        self.passes.append(len(run.ids))
        return super().forward(run, cache)


def batch(model: Any) -> tuple[ContinuousBatch, Counted]:
    dense = Counted(model)
    dense.pack(0)
    return ContinuousBatch(Loaded(model, None, VOCABULARY, 512, frozenset([1])), dense, np.random.default_rng(0)), dense


def greedy(prompt: list[int], count: int) -> Response:
    return Response("", list(prompt), SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True))


def check(model: Any, response: Response) -> None:
    """The tokens are the likeliest ones of transformers' forward pass, and the log-probs are its."""
    ids, start = torch.tensor([response.prompt_ids + response.output_ids]), len(response.prompt_ids)
    log_probs = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
    assert response.output_ids == log_probs.argmax(-1).tolist()
    assert response.log_probs == pytest.approx(log_probs.max(-1).values.tolist(), abs=1e-4)


def test_prompts_that_begin_alike_are_computed_from_where_they_differ(model: Any) -> None:
    running, dense = batch(model)
    together = [greedy(prompt, 6) for prompt in QUESTIONS[:3] for _ in range(2)]
    running.add(together)
    running.step()
    assert dense.passes == [42 + 2 + 1]
    assert [r.cached_tokens for r in together] == [0, 42, 41, 43, 40, 41]
    later = greedy(QUESTIONS[3], 4)
    running.add([later])
    running.step()
    assert dense.passes[1:] == [len(together) + 5]
    assert later.cached_tokens == 40
    while not running.done:
        running.step()
    for response in (*together, later):
        check(model, response)


def test_what_other_weights_computed_is_not_a_beginning(model: Any) -> None:
    running, dense = batch(model)
    first, later = greedy(QUESTIONS[0], 4), greedy(QUESTIONS[1], 2)
    running.add([first])
    running.step()
    dense.pack(1)
    running.add([later])
    running.step()
    assert (later.cached_tokens, dense.passes[1]) == (0, 1 + len(QUESTIONS[1]))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 40), st.lists(st.integers(2, 5), min_size=1, max_size=20)),
        min_size=1, max_size=8,
    ),
    st.sampled_from([3, dense_module.MASKED_QUERIES]),
)  # fmt: skip
def test_prompts_may_share_any_beginning_whenever_they_come(
    model: Any, arrivals: list[tuple[int, int, list[int]]], masked: int
) -> None:
    running, _ = batch(model)
    responses = [(step, greedy([*EXAMPLES[:common], *tail], 3)) for step, common, tail in arrivals]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_module, "MASKED_QUERIES", masked)
        for now in range(7):
            running.add([response for step, response in responses if step == now])
            if not running.done:
                running.step()
        while not running.done:
            running.step()
    for _, response in responses:
        check(model, response)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=50), min_size=1, max_size=5), st.integers(0, 50))
def test_a_beginning_is_one_that_both_have(others: list[list[int]], cut: int) -> None:
    tokens, beginnings = others[0][:cut] + [1, 0], Beginnings()
    for row, each in enumerate(others):
        beginnings.add(row, each, fingerprints(each))
    row, known = beginnings.longest(tokens, fingerprints(tokens))
    assert known < len(tokens)
    assert tokens[:known] == others[row][:known]
    if min(cut, len(others[0])) >= BLOCK:
        assert known >= BLOCK


def test_equal_fingerprints_of_other_tokens_are_no_beginning() -> None:
    beginnings = Beginnings()
    beginnings.add(3, list(range(20)), [77])
    assert beginnings.longest(list(range(1, 21)), [77]) == (0, 0)
    assert beginnings.longest([*range(18), 50], [77]) == (3, 18)
