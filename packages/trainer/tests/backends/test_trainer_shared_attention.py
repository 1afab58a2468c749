"""Merges the results of the two kernels of attention over shared prompts, as it is and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime.trainer.backends import shared_attention

# Prompts of 6 and of 4 tokens, before 10 of responses and 4 of a sample alone.
T, H, D = 24, 2, 8
K_LIMITS = torch.tensor([0, 6, 10], dtype=torch.int32)
Q_LIMITS = torch.tensor([10, 16, 20, 20], dtype=torch.int32)


@pytest.fixture(params=[False, True], ids=["as it is", "compiled"])
def compiled(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return torch.compile if request.param else lambda function: function


def rows(*shape: int, inside: slice, seed: int) -> torch.Tensor:
    """Random numbers, and outside whatever memory held."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    held = torch.full_like(values, float("nan"))
    held[inside] = values[inside]
    return held


def test_both_calls_together_are_attention_over_all_their_keys(compiled: Callable[..., Any]):
    inside = slice(10, 20)
    own, prompt = rows(T, H, D, inside=slice(0, T), seed=0), rows(T, H, D, inside=inside, seed=1)
    own_lse = torch.randn(H, T, generator=torch.Generator().manual_seed(2))
    prompt_lse = rows(T, H, inside=inside, seed=3).float().t().contiguous()
    output, lse = compiled(shared_attention.merge)(own, own_lse, prompt, prompt_lse, Q_LIMITS)
    assert output.is_contiguous() and lse.is_contiguous() and output.dtype == torch.bfloat16
    weights = torch.stack([own_lse, prompt_lse]).double()[..., inside].softmax(0).transpose(1, 2)[..., None]
    expected = weights[0] * own[inside].double() + weights[1] * prompt[inside].double()
    torch.testing.assert_close(output[inside].double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[:, inside], torch.logaddexp(own_lse, prompt_lse)[:, inside])
    for outside in (slice(0, 10), slice(20, T)):
        assert torch.equal(output[outside], own[outside]) and torch.equal(lse[:, outside], own_lse[:, outside])


def test_gradients_of_both_calls_add_up_where_there_are_two(compiled: Callable[..., Any]):
    whole = slice(0, T)
    own = tuple(rows(T, H, D, inside=whole, seed=seed) for seed in range(3))
    spans = slice(10, 20), slice(0, 10), slice(0, 10)
    prompt = tuple(rows(T, H, D, inside=span, seed=seed + 3) for seed, span in enumerate(spans))
    found = compiled(shared_attention.add)(own, prompt, Q_LIMITS, K_LIMITS)
    for mine, theirs, span, both in zip(own, prompt, spans, found, strict=True):
        expected = mine.clone()
        expected[span] += theirs[span]
        assert both.is_contiguous() and torch.equal(both, expected)
