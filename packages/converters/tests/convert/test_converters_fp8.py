"""Weights in FP8: how far they are from what they stand for, and that a checkpoint's own are made again bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime.converters.convert import fp8
from slime.converters.convert.hf_source import HfSource
from slime.converters.convert.quantization_config import Fp8Blocks, quantization_of, updatable
from slime.converters.convert.quantized import Fp8Form, form_of
from slime.types.errors import InvalidFile, MissingFile, NotAvailable

BLOCKS = [(128, 128), (16, 24)]
few = settings(max_examples=20, deadline=None)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
Pair = tuple[torch.Tensor, torch.Tensor]


@st.composite
def matrices(draw: st.DrawFn, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers of very different sizes from block to block, and some blocks of zeros."""
    rows, columns = draw(st.integers(1, 150)), draw(st.integers(1, 300))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(rows, columns, generator=random)
    exponents = torch.randint(-60, 60, (-(-rows // 16), -(-columns // 16)), generator=random)
    kept = torch.rand(exponents.shape, generator=random) > 0.2
    weight *= _spread((exponents.float().exp2() * kept), (16, 16), weight.shape)
    return weight.to(dtype)


def _spread(factors: torch.Tensor, block: tuple[int, int], shape: Any) -> torch.Tensor:
    tall, wide = block
    return factors.repeat_interleave(tall, 0).repeat_interleave(wide, 1)[: shape[0], : shape[1]]


def dequantized(pair: Pair, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    weight, factors = pair
    return (weight.to(dtype) * _spread(factors.to(dtype), block, weight.shape)).to(dtype)


def same(first: Pair, second: Pair) -> bool:
    """Compares the bits, so that -0.0 differs from 0.0."""
    return all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )


@few
@given(
    matrices(torch.float32), st.sampled_from(BLOCKS), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()
)
def test_a_weight_moves_by_no_more_than_half_a_step(
    weight: torch.Tensor, block: tuple[int, int], factor_dtype: torch.dtype, power_of_two: bool
) -> None:
    pair = fp8.quantize(weight, block, factor_dtype=factor_dtype, power_of_two=power_of_two)
    assert (pair[0].dtype, pair[0].shape) == (torch.float8_e4m3fn, weight.shape)
    assert (pair[1].dtype, tuple(pair[1].shape)) == (factor_dtype, fp8.grid(weight.shape, block))
    exact, factor = weight.double(), _spread(pair[1].double(), block, weight.shape)
    # Numbers below 2**-6 are multiples of 2**-9; the others have three bits after the first.
    half_step = torch.maximum(exact.abs() / 2**4, factor / 2**10)
    assert bool(((dequantized(pair, block, torch.float64) - exact).abs() <= half_step * (1 + 1e-6)).all())
    if power_of_two:
        assert bool((torch.frexp(pair[1].float())[0] == 0.5).all())


@few
@given(matrices(torch.float32), st.sampled_from(BLOCKS))
def test_factors_are_those_of_the_formula(weight: torch.Tensor, block: tuple[int, int]) -> None:
    factors = fp8.quantize(weight, block)[1]
    for row in range(factors.shape[0]):
        for column in range(factors.shape[1]):
            tall, wide = block
            largest = weight[row * tall : (row + 1) * tall, column * wide : (column + 1) * wide].double().abs().max()
            expected = largest / 448 if largest > 0 else torch.ones((), dtype=torch.float64)
            assert factors[row, column] == expected.float()


@few
@given(matrices(), st.sampled_from(BLOCKS))
def test_weights_that_were_read_in_bfloat16_are_quantized_to_what_they_were(
    weight: torch.Tensor, block: tuple[int, int]
) -> None:
    pair = fp8.quantize(weight, block)
    assert same(fp8.quantize(dequantized(pair, block, torch.float32).bfloat16(), block), pair)


@few
@given(matrices(torch.float32), st.sampled_from(BLOCKS))
def test_factors_in_bfloat16_come_back_from_exact_products(weight: torch.Tensor, block: tuple[int, int]) -> None:
    pair = fp8.quantize(weight, block, factor_dtype=torch.bfloat16)
    assert same(fp8.quantize(dequantized(pair, block, torch.float32), block, factor_dtype=torch.bfloat16), pair)


@few
@given(matrices(torch.float32), st.sampled_from(BLOCKS))
def test_powers_of_two_keep_every_value(weight: torch.Tensor, block: tuple[int, int]) -> None:
    """Not every bit: if the largest of a block was rounded down to 224, half the factor says the same."""
    pair = fp8.quantize(weight, block, power_of_two=True)
    values = dequantized(pair, block, torch.bfloat16)
    assert torch.equal(dequantized(fp8.quantize(values, block, power_of_two=True), block, torch.bfloat16), values)


@few
@given(matrices(), st.sampled_from(BLOCKS), st.integers(1, 20_000))
def test_chunks_do_not_matter(weight: torch.Tensor, block: tuple[int, int], chunk: int) -> None:
    assert same(fp8.quantize(weight, block, chunk=chunk), fp8.quantize(weight, block))


def test_numbers_that_are_not_finite_stay_so() -> None:
    weight = torch.ones(2, 8)
    weight[0, 1], weight[1, 5] = float("nan"), float("inf")
    values = dequantized(fp8.quantize(weight, (2, 4)), (2, 4), torch.float32)
    assert not bool(values[0, 1].isfinite()) and not bool(values[1, 5].isfinite())


@pytest.mark.parametrize("number", [1e-45, 1e-38, 3e38])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_ends_of_the_range(number: float, power_of_two: bool) -> None:
    weight = torch.full((3, 3), number)
    pair = fp8.quantize(weight, (2, 2), power_of_two=power_of_two)
    assert bool(pair[1].isfinite().all() and (pair[1] > 0).all())
    # Numbers far below the smallest factor become 0.
    values = dequantized(pair, (2, 2), torch.float64)
    assert bool(((values - weight.double()).abs() <= weight.double() / 2**4 + fp8.SMALLEST_FACTOR / 2**10).all())


def test_what_a_checkpoint_holds_comes_back_from_reading_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(200, 130).bfloat16() for name in ("a.weight", "b.weight", "plain.weight")}
    stored = {"plain.weight": weights["plain.weight"]}
    for name, dtype in (("a.weight", torch.float32), ("b.weight", torch.bfloat16)):
        stored[name], stored[f"{name}_scale_inv"] = fp8.quantize(weights[name], (128, 128), factor_dtype=dtype)
    save_file(stored, tmp_path / "model.safetensors")
    form = Fp8Form(tmp_path, Fp8Blocks((128, 128)))
    source = HfSource(tmp_path, {"quantization_config": FP8})
    read = {name: source.load(name) for name in source.tensors}
    source.close()
    found = dict(form.quantized(iter(read.items())))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    assert same((found["a.weight"], found["a.weight_scale_inv"]), (stored["a.weight"], stored["a.weight_scale_inv"]))
    assert found["plain.weight"] is read["plain.weight"]
    sizes = {name: tensor.numel() for name, tensor in weights.items()}
    assert form.num_bytes(sizes, torch.bfloat16) == sum(tensor.nbytes for tensor in stored.values())
    with pytest.raises(InvalidFile, match=r"a\.weight: the checkpoint has \[200, 130\], the model \[130, 200\]"):
        list(form.quantized(iter([("a.weight", torch.zeros(130, 200))])))


@pytest.mark.parametrize("inside", [(), ("text_config",)])
def test_the_config_says_how_weights_are_quantized(inside: tuple[str, ...]) -> None:
    def config(**changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"quantization_config": FP8 | changes}
        for key in inside:
            found = {key: found}
        return found

    assert quantization_of(config()) == FP8
    assert updatable(config(), "M") == Fp8Blocks((128, 128))
    assert updatable(config(fmt="float8_e4m3fn"), "M") == Fp8Blocks((128, 128))
    assert updatable(config(scale_fmt="ue8m0"), "M") == Fp8Blocks((128, 128), power_of_two=True)
    for changes, reason in (
        ({"weight_block_size": None}, "not to fp8 with weight_block_size None"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "not to pack-quantized"),
        ({"quant_method": "awq"}, "not to awq"),
        ({"fmt": "e5m2"}, "quantized to e4m3"),
        ({"scale_fmt": ["ue8m0"]}, "quantized to e4m3"),
        ({"scale_fmt": "e8"}, "quantized to e4m3 with factors in float or ue8m0"),
        ({"activation_scheme": "static"}, "its activations have constant factors"),
    ):
        with pytest.raises(NotAvailable, match=rf"^M with quantization_config \(.*\) is not supported yet: .*{reason}"):
            updatable(config(**changes), "M")
    with pytest.raises(InvalidFile, match="quantization_config must be an object, got 'fp8'"):
        updatable({"quantization_config": "fp8"}, "M")
    assert updatable({}, "M") is None and updatable({"quantization_config": None}, "M") is None


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"a.weight_scale_inv": None}, InvalidFile, r"a\.weight is fp8 and has no a\.weight_scale_inv for blocks"),
        ({"a.weight_scale_inv": torch.ones(3, 1)}, InvalidFile, "for blocks of"),
        ({"a.weight_scale_inv": torch.ones(2, 2).half()}, NotAvailable, "a.weight_scale_inv of dtype F16"),
        ({"a.weight": torch.zeros(130, 130)}, InvalidFile, "none of its tensors is fp8"),
    ],
)
def test_a_checkpoint_whose_form_is_unclear_is_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], error: type[Exception], reason: str
) -> None:
    tensors = {"a.weight": torch.zeros(130, 130).to(fp8.DTYPE), "a.weight_scale_inv": torch.ones(2, 2)} | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(error, match=reason):
        Fp8Form(tmp_path, Fp8Blocks((128, 128)))


def test_a_quantized_model_without_weights_has_no_form(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert form_of(tmp_path) is None
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}'
    )
    with pytest.raises(MissingFile, match="no .safetensors files"):
        form_of(tmp_path)
