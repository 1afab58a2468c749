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
from slime.trainer.backends import attention, cudnn_attention, shared_attention
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


needs_cudnn = pytest.mark.skipif(
    not torch.cuda.is_available() or not cudnn_attention._wanted(torch.device("cuda", 0)),
    reason="needs a Hopper GPU and nvidia-cudnn-frontend",
)

CUDNN_SHAPES = [(8, 8, 128), (9, 3, 128), (16, 8, 128), (32, 8, 128), (4, 1, 128)]


def padded(runs: Runs, more: int) -> Runs:
    """Adds runs without tokens, and prompts if there are any."""
    limits = torch.cat([runs.q_limits, runs.q_limits[-1:].expand(more)])
    shared = runs.shared
    if shared is not None:
        held = [torch.cat([x, x[-1:].expand(more)]) for x in (shared.q_limits, shared.k_limits)]
        shared = dataclasses.replace(shared, q_limits=held[0], k_limits=held[1])
    return dataclasses.replace(runs, q_limits=limits, k_limits=limits, shared=shared, padded=True)


def tensors_of(shape: tuple[int, int, int], total: int) -> tuple[list[Tensor], Tensor]:
    heads, groups, width = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    sizes = ((heads, width), (groups, width), (groups, width))
    plain = [torch.randn(total, *s, generator=generator, device="cuda", requires_grad=True) for s in sizes]
    return plain, torch.randn(total, heads, width, generator=generator, device="cuda")


def output_and_gradients(tensors: list[Tensor], weights: Tensor, runs: Runs) -> list[Tensor]:
    output = attention.attend(*tensors, runs, weights.shape[-1] ** -0.5)
    return [output, *torch.autograd.grad((output.float() * weights).sum(), tensors)]


def check_padded(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int], runs: Runs) -> None:
    plain, weights = tensors_of(shape, int(runs.q_limits[-1]))
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in plain]
    expected = output_and_gradients(plain, weights, runs)
    asked: list[object] = []
    find_plan = shared_attention.find_plan

    def find(query: Tensor, key: Tensor, bounds: cudnn_attention.Bounds, causal: bool, scale: float | None) -> object:
        asked.append(find_plan(query, key, bounds, causal, scale))
        return asked[-1]

    monkeypatch.setattr(shared_attention, "find_plan", find)
    for more in (0, 7):
        for found, wanted in zip(output_and_gradients(half, weights, padded(runs, more)), expected, strict=True):
            # Both inputs and outputs were rounded to 8 bits: of the size of the whole, not of each number.
            error = (found.float() - wanted).norm() / wanted.norm()
            assert error < 0.01, error
    assert asked and None not in asked


@needs_cudnn
@pytest.mark.parametrize("shape", CUDNN_SHAPES)
def test_runs_of_a_padded_row(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    check_padded(monkeypatch, shape, Runs.apart([300, 1, 77, 512, 130], "cuda"))


@needs_cudnn
@pytest.mark.parametrize("shape", CUDNN_SHAPES)
@pytest.mark.parametrize("responses", [[[128, 1, 500, 77], [30, 250]], [[0, 0], [30, 250]]])
def test_shared_prompts_of_a_padded_row(
    shape: tuple[int, int, int], responses: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels leave memory as it was where no query follows a prompt.
    poison = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
    del poison
    check_padded(monkeypatch, shape, Runs.sharing([300, 17], responses, [200, 64], "cuda"))


@needs_cudnn
def test_a_graph_of_a_row_takes_other_limits() -> None:
    plain, weights = tensors_of((16, 8, 128), 1024)
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in plain]
    limits = torch.tensor([0, 300, 1024, 1024, 1024], dtype=torch.int32, device="cuda")
    row = Runs([], [], limits, limits, None, 1024, 1024, padded=True)
    output_and_gradients(half, weights, row)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = output_and_gradients(half, weights, row)
    for lengths in ([300, 724], [1024], [1, 1000, 22, 1]):
        runs = Runs.apart(lengths, "cuda")
        limits[: len(lengths) + 1] = runs.q_limits
        limits[len(lengths) + 1 :] = 1024
        graph.replay()
        for found, wanted in zip(captured, output_and_gradients(plain, weights, runs), strict=True):
            assert (found.float() - wanted).norm() < 0.01 * wanted.norm()
