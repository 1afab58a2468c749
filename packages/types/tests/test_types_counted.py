"""Counts in messages agree with their nouns and verbs."""

from __future__ import annotations

import pytest

from slime.types.errors import counted

NUM_GPUS = 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((1, "node"), "1 node"),
        ((0, "node"), "0 nodes"),
        ((2, "forward pass"), "2 forward passes"),
        ((2, "batch"), "2 batches"),
        ((2, "trajectory"), "2 trajectories"),
        ((1, "trajectory"), "1 trajectory"),
        ((2, "array"), "2 arrays"),
        ((1, "tensor is", "tensors are"), "1 tensor is"),
        ((3, "tensor is", "tensors are"), "3 tensors are"),
        ((4096, "token"), "4096 tokens"),
    ],
)
def test_a_count_agrees_with_its_noun(words: tuple[int, str], text: str) -> None:
    assert counted(*words) == text
