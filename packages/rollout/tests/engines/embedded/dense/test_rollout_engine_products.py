"""Products of matrices in panels are those of float64 to rounding, whatever the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.rollout.engines.embedded.dense import loop_ops, products
from slime.rollout.engines.embedded.dense.loop_ops import LoopOps
from slime.rollout.engines.embedded.dense.matrices import Matrix, TorchMatrix
from slime.rollout.engines.embedded.dense.ops import Heads
from slime.rollout.engines.embedded.dense.products import PanelMatrix, Products

needs_pairs = pytest.mark.skipif(not products.multiplies_pairs(), reason="needs AVX512-BF16, and no AMX")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8 * 1.01}


@pytest.fixture(autouse=True, scope="module")
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(found: Tensor, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    expected, size = x_NI.double() @ weight_OI.double().T, x_NI.double().abs() @ weight_OI.double().abs().T
    if bias_O is not None:
        expected, size = expected + bias_O.double(), size + bias_O.double().abs()
    # Sums of float32 are wrong in proportion to what is summed up, their rounding to what comes out.
    limit = 2e-6 * size + ROUNDING[found.dtype] * expected.abs()
    assert found.shape == expected.shape and ((found.double() - expected).abs() <= limit).all()


@needs_pairs
@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 40), pairs=st.integers(1, 40), outputs=st.integers(1, 200), biased=st.booleans(),
    threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_products_are_those_of_float64(count: int, pairs: int, outputs: int, biased: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    x_NI, weight_OI = random(0, count, 2 * pairs), random(1, outputs, 2 * pairs)
    bias_O = random(2, outputs) if biased else None
    matrix = PanelMatrix(Products(), weight_OI, bias_O)
    check(matrix(x_NI), x_NI, weight_OI, bias_O)
    # A part of larger rows, for fewer tokens than there are.
    wide = torch.full((count, outputs + 3), 7.0)
    few = max(1, count - 2)
    assert matrix(x_NI, wide[:few, 2:-1]).dtype == torch.float32
    check(wide[:few, 2:-1], x_NI[:few], weight_OI, bias_O)
    assert (wide[few:] == 7).all() and (wide[:, :2] == 7).all() and (wide[:, -1] == 7).all()


@needs_pairs
def test_many_tokens_of_a_large_matrix_are_multiplied() -> None:
    torch.set_num_threads(2)
    x_NI, weight_OI = random(0, 301, 1536), random(1, 1000, 1536)
    check(PanelMatrix(Products(), weight_OI, None)(x_NI), x_NI, weight_OI, None)


@needs_pairs
def test_a_result_lasts_until_the_next_product() -> None:
    shared, x_NI = Products(), random(0, 5, 64)
    weights = [random(seed, outputs, 64) for seed, outputs in enumerate((48, 100, 7))]
    matrices = [PanelMatrix(shared, weight, None) for weight in weights]
    for weight, matrix in zip(weights * 2, matrices * 2, strict=True):
        check(matrix(x_NI), x_NI, weight, None)


@needs_pairs
@pytest.mark.parametrize("where", [(0, 0), (63, 49)])
def test_numbers_that_are_none_show(where: tuple[int, int]) -> None:
    token, output = where
    x_NI, weight_OI = random(0, 64, 32), random(1, 50, 32)
    x_NI[token, 3], weight_OI[output, 31] = torch.nan, torch.nan
    found = PanelMatrix(Products(), weight_OI, None)(x_NI)
    expected = torch.zeros(64, 50, dtype=torch.bool)
    expected[token], expected[:, output] = True, True
    assert torch.equal(found.isnan(), expected)


def test_panels_hold_pairs_of_all_weights_wherever_these_lie() -> None:
    weights = random(0, 1 + 50 * 6)
    # The first begins in the middle of a pair of its memory.
    for weight_OI in (weights[1:].view(50, 6), weights[:-1].view(50, 6), random(1, 6, 50).T):
        panels = products.in_panels(weight_OI)
        assert panels.shape == (2, 3, 48) and panels.is_contiguous()
        outputs = panels.view(torch.bfloat16).view(2, 3, 48, 2).transpose(1, 2).reshape(96, 6)
        assert torch.equal(outputs[:50], weight_OI) and not outputs[50:].any()


def made(dtype: torch.dtype, inputs: int) -> Matrix:
    weights = [torch.ones(2, inputs, dtype=dtype), torch.full((1, inputs), 2, dtype=dtype)]
    biases: list[Tensor | None] = [torch.ones(2, dtype=dtype), torch.zeros(1, dtype=dtype)]
    matrix = LoopOps(Heads(2, 1, 16, 1.0), 1e-5, dtype).matrix(weights, biases)
    found = matrix(torch.ones(4, inputs, dtype=dtype))
    assert found.dtype == dtype and found.tolist() == [[inputs + 1, inputs + 1, 2 * inputs]] * 4
    return matrix


@needs_pairs
def test_panels_are_for_pairs_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(made(torch.bfloat16, 6)) is PanelMatrix
    assert type(made(torch.bfloat16, 5)) is TorchMatrix
    assert type(made(torch.float32, 6)) is TorchMatrix
    monkeypatch.setattr(loop_ops, "multiplies_pairs", lambda: False)
    assert type(made(torch.bfloat16, 6)) is TorchMatrix


@pytest.mark.parametrize(
    ("features", "expected"),
    [({"avx512bf16": True, "amx-bf16": False}, True), ({"avx512bf16": True, "amx-bf16": True}, False), ({}, False)],
)
def test_processors_with_instructions_for_whole_tiles_leave_it_to_torch(
    features: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "get_host_cpu_features", lambda: features)
    assert products.multiplies_pairs() is expected
