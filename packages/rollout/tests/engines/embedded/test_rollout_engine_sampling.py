"""Drawing tokens: keyed, restricted, and distributed as the model says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.engines.embedded.model import response as response_module
from slime.rollout.engines.embedded.model.params import SamplingParams, parse_sampling_params
from slime.rollout.engines.embedded.model.sampling import keyed_uniforms, sample
from slime.types.errors import InvalidField

INTEGERS = st.integers(-(2**63), 2**63 - 1)


def draw(logits: torch.Tensor, count: int, **params: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.expand(count, -1).clone()
    return sample(rows, [SamplingParams(**params)] * count, [0] * count, np.random.default_rng(0))[:2]


@given(st.lists(st.tuples(INTEGERS, st.integers(0, 2**40)), min_size=1, max_size=20))
def test_a_keyed_draw_depends_on_its_key_alone(keys: list[tuple[int, int]]) -> None:
    seeds, positions = (np.array(column, dtype=np.int64) for column in zip(*keys, strict=True))
    together = keyed_uniforms(seeds, positions)
    assert np.all((together >= 0) & (together < 1))
    alone = [keyed_uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(len(keys))]
    assert together.tolist() == alone


@pytest.mark.parametrize("along", ["seed", "position"])
def test_keyed_draws_are_uniform_and_uncorrelated(along: str) -> None:
    varying, fixed = np.arange(20_000, dtype=np.int64), np.full(20_000, 7, dtype=np.int64)
    draws = keyed_uniforms(varying, fixed) if along == "seed" else keyed_uniforms(fixed, varying)
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_square = ((counts - 1000.0) ** 2 / 1000.0).sum()
    assert chi_square < 45  # 19 degrees of freedom: passed with probability 0.999
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_draws_follow_the_distribution_at_the_temperature() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -8.0]])
    for temperature in (0.7, 1.0, 1.5):
        expected = (logits[0] / temperature).softmax(-1)
        ids, log_probs = draw(logits, 20_000, temperature=temperature)
        seen = torch.bincount(ids, minlength=5) / 20_000
        assert torch.allclose(seen, expected, atol=0.015)
        assert torch.allclose(log_probs, expected.log()[ids], atol=1e-5)


@pytest.mark.parametrize(
    "params, allowed",
    [
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {0, 3}),
        ({"top_p": 0.6}, {3}),
        ({"top_p": 0.8}, {0, 3}),
        ({"temperature": 0}, {3}),
    ],
)
def test_top_k_and_top_p_keep_the_most_likely(params: dict[str, float], allowed: set[int]) -> None:
    # probabilities: 0.24, 0.09, 0.03, 0.64
    ids, _ = draw(torch.tensor([[1.0, 0.0, -1.0, 2.0]]), 2_000, **params)
    assert set(ids.tolist()) == allowed


def test_every_row_has_parameters_of_its_own() -> None:
    logits = torch.tensor([[0.0, 3.0, 0.0], [0.0, 3.0, 0.0]])
    params = [SamplingParams(temperature=0), SamplingParams(sampling_seed=4)]
    ids, *_ = sample(logits, params, [0, 9], np.random.default_rng(0))
    assert ids[0] == 1
    alone, *_ = sample(logits[1:], params[1:], [9], np.random.default_rng(5))
    assert ids[1] == alone[0]


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.02}, {"top_p": 0.9}, {"top_k": 700, "top_p": 0.5}, {}])
def test_a_large_vocabulary_is_restricted_as_a_sorted_one_is(params: dict[str, float]) -> None:
    logits = torch.randn(1, 3001, generator=torch.Generator().manual_seed(0)) / 4  # nearly flat: top-p is far down
    probabilities, order = logits[0].softmax(-1).double().sort(descending=True)
    ranks = torch.arange(3001)
    before = probabilities.cumsum(-1) - probabilities
    allowed = (ranks < params.get("top_k", 3001)) & (before < params.get("top_p", 1.0))
    ids, log_probs = draw(logits, 3_000, **params)
    assert set(ids.tolist()) <= set(order[allowed].tolist())
    assert torch.allclose(log_probs, logits[0].log_softmax(-1)[ids], atol=1e-5)
    expected = probabilities[allowed] / probabilities[allowed].sum()
    position = {token: rank for rank, token in enumerate(order.tolist())}
    mean = sum(position[token] for token in ids.tolist()) / 3_000
    deviation = float((expected * ranks[allowed] ** 2).sum() - (expected * ranks[allowed]).sum() ** 2) ** 0.5
    assert abs(mean - float((expected * ranks[allowed]).sum())) < 4 * deviation / 3_000**0.5


@pytest.mark.parametrize("params", [{"top_p": 1e-46}, {"top_k": 10**30, "top_p": 1e-46}, {"temperature": 1e-46}])
def test_parameters_that_float32_cannot_hold_leave_the_likeliest(params: dict[str, float]) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -8.0]])
    parsed = parse_sampling_params(params)
    ids, log_probs, _ = sample(logits.clone(), [parsed], [0], np.random.default_rng(0))
    assert ids.tolist() == [3]
    # SGLang, too, takes a temperature below 1e-6 as greedy, whose log-prob is that of temperature 1.
    assert log_probs.tolist() == pytest.approx(logits.log_softmax(-1)[:, 3].tolist(), abs=1e-6)


@pytest.mark.parametrize("stop", ["\ud800", ["a", "b\udfff"]])
def test_a_stop_text_that_no_token_can_spell_is_refused_before_others_are_decoded_with_it(stop: object) -> None:
    with pytest.raises(InvalidField, match=r"request\.stop: got .*surrogates not allowed, expected text"):
        parse_sampling_params({"stop": stop}, "request")


def test_any_top_k_above_the_vocabulary_is_all_of_it() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, -8.0]])
    assert draw(logits, 50, top_k=10**30)[0].tolist() == draw(logits, 50)[0].tolist()


def test_a_nucleus_is_told_where_it_is_asked_for_and_the_log_prob_is_of_its_tokens_alone() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]]).expand(5, -1).clone()  # probabilities: 0.24, 0.09, 0.03, 0.64
    params = [SamplingParams(**each) for each in ({"top_p": 0.8}, {"top_p": 0.8}, {}, {"top_k": 3}, {"temperature": 0})]
    expected = logits.log_softmax(-1)
    ids, log_probs, nuclei = sample(logits, params, [0] * 5, np.random.default_rng(0), recorded=[0, 2, 3, 4])
    assert {row: nucleus.tolist() for row, nucleus in nuclei.items()} == {0: [0, 3], 3: [0, 1, 3]}
    for row, nucleus in nuclei.items():
        expected[row] -= expected[row, nucleus.tolist()].logsumexp(-1)
    assert torch.allclose(log_probs, expected[range(5), ids], atol=1e-6)


def test_nuclei_beyond_their_bound_end_their_response_with_what_to_change(monkeypatch) -> None:
    monkeypatch.setattr(response_module, "MOST_NUCLEUS_IDS", 10)
    response = response_module.Response("r", [1], SamplingParams(top_p=0.999))
    response.add_nucleus(np.arange(10, dtype=np.int32))
    with pytest.raises(InvalidField, match="more than 10 token ids after 1 tokens: lower --rollout-top-p 0.999"):
        response.add_nucleus(np.arange(1, dtype=np.int32))
    # One that is generated anew has none.
    response.start_over()
    response.add_nucleus(np.arange(10, dtype=np.int32))
