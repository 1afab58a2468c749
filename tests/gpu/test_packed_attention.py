"""Attention over packed rows by one kernel on a GPU, against the same in float32, run by run.

pytest tests/gpu/test_packed_attention.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_needs import needs
from slime.trainer.backends import attention
from slime.trainer.batching.runs import Runs

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS)

LENGTHS = [300, 1, 77, 512, 130]


def runs_of(shared: bool) -> Runs:
    if not shared:
        return Runs.apart(LENGTHS, "cuda")
    # Every run but the first sees the first 100 tokens besides its own.
    keys, start = [], 0
    for number, length in enumerate(LENGTHS):
        own = np.arange(start, start + length)
        keys.append(own if number == 0 else np.concatenate([np.arange(100), own]))
        start += length
    return Runs.gathered(LENGTHS, keys, "cuda")


def check(shape: tuple[int, int, int, int], runs: Runs, window: int | None) -> None:
    heads, groups, width, value_width = shape
    total = int(runs.q_limits[-1])
    generator = torch.Generator(device="cuda").manual_seed(0)
    sizes = ((heads, width), (groups, width), (groups, value_width))
    plain = [torch.randn(total, *s, generator=generator, device="cuda", requires_grad=True) for s in sizes]
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in plain]
    assert attention.flash_takes(half[0]) and not attention.flash_takes(plain[0])
    weights = torch.randn(total, heads, value_width, generator=generator, device="cuda")

    def with_gradients(tensors: list[Tensor]) -> list[Tensor]:
        output = attention.attend(*tensors, runs, width**-0.5, window)
        return [output, *torch.autograd.grad((output.float() * weights).sum(), tensors)]

    for found, expected in zip(with_gradients(half), with_gradients(plain), strict=True):
        # Both inputs and outputs were rounded to 8 bits: of the size of the whole, not of each number.
        error = (found.float() - expected).norm() / expected.norm()
        assert error < 0.01, error


SHAPES = [(8, 8, 64, 64), (9, 3, 64, 64), (16, 8, 128, 128), (8, 8, 192, 128)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_kernel_gives_what_float32_gives_run_by_run(
    shape: tuple[int, int, int, int], window: int | None, shared: bool
) -> None:
    check(shape, runs_of(shared), window)


@pytest.mark.parametrize("shape", SHAPES)
def test_shared_prompts_give_what_float32_gives_run_by_run(shape: tuple[int, int, int, int]) -> None:
    runs = Runs.sharing([300, 17], [[128, 1, 500, 77], [30, 250]], [200, 64], "cuda")
    check(shape, runs, None)
    shared = runs.shared
    assert shared is not None
    # A padded row: prompts and responses without a token.
    limits = [torch.cat([x, x[-1:].expand(5)]) for x in (shared.q_limits, shared.k_limits)]
    more = dataclasses.replace(shared, q_limits=limits[0], k_limits=limits[1])
    check(shape, dataclasses.replace(runs, shared=more), None)
