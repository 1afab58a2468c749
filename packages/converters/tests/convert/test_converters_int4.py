"""Weights in INT4: how far they are from what they stand for, and that those of a checkpoint are made again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.converters.convert import hf_to_hf, int4
from slime.converters.convert.hf_source import HfSource
from slime.converters.convert.quantization_config import Int4Groups, group_size, updatable
from slime.converters.convert.quantized import Int4Form, form_of
from slime.types.errors import InvalidFile, NotAvailable

few = settings(max_examples=20, deadline=None)
Pair = tuple[torch.Tensor, torch.Tensor]


def config(**changes: Any) -> dict[str, Any]:
    """The quantization_config of Kimi-K2-Thinking, with these changes of its weights."""
    weights: dict[str, Any] = {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights | changes}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


@st.composite
def matrices(draw: st.DrawFn, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers of very different sizes from group to group of 16, and some groups of zeros."""
    rows, groups = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn(rows, groups, 16, generator=random)
    sizes = torch.randint(-40, 40, (rows, groups, 1), generator=random).float().exp2()
    kept = torch.rand(sizes.shape, generator=random) > 0.1
    return (weight * sizes * kept).view(rows, -1).to(dtype)


@st.composite
def on_a_grid(draw: st.DrawFn) -> Pair:
    """Values that reach to 7, to -8, or from -7 to 7 at most, as quantization leaves them; and scales of groups."""
    rows, groups, size = draw(st.integers(1, 40)), draw(st.integers(1, 6)), draw(st.sampled_from([8, 32]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    values = torch.randint(-8, 8, (rows, groups, size), generator=random)
    reached = torch.tensor([7, -7, -8])[torch.randint(0, 3, (rows, groups), generator=random)]
    values = torch.where((reached == -8)[..., None], values, values.clamp(min=-7))
    values[..., draw(st.integers(0, size - 1))] = reached
    scales = torch.randn(rows, groups, generator=random).exp().bfloat16()
    return int4.pack(values.view(rows, -1).to(torch.int8)), scales


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 1 << 30))
def test_values_come_back_from_their_words(rows: int, words: int, seed: int) -> None:
    values = torch.randint(-8, 8, (rows, 8 * words), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    packed = int4.pack(values)
    assert (packed.dtype, packed.shape) == (torch.int32, (rows, words))
    assert torch.equal(int4.unpack(packed), values)


def test_words_are_those_of_compressed_tensors() -> None:
    # The numbers of its pack_to_int32: the first column is in the lowest bits, and 8 is added to each value.
    values = torch.tensor([[-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int8)
    assert int4.pack(values).tolist() == [[0x76543210, 0xFEDCBA98 - (1 << 32)]]


def test_words_are_those_of_compressed_tensors_own_function() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-8, 8, (5, 64)).to(torch.int8)
    assert torch.equal(int4.pack(values), helpers.pack_to_int32(values, 4))


@few
@given(matrices(torch.float32), st.sampled_from([8, 16]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_weight_moves_by_no_more_than_half_a_step(weight: torch.Tensor, group: int, dtype: torch.dtype) -> None:
    packed, scales = int4.quantize(weight, group, scale_dtype=dtype)
    rows, columns = weight.shape
    assert (packed.dtype, packed.shape) == (torch.int32, (rows, columns // 8))
    assert (scales.dtype, scales.shape) == (dtype, (rows, columns // group))
    exact, steps = weight.double(), scales.double().repeat_interleave(group, 1)
    error = (int4.unpack(packed).double() * steps - exact).abs()
    assert bool((error <= steps / 2 * (1 + 1e-6)).all())
    # No step is longer than with the largest magnitude at 7, save by the rounding of the scale.
    largest = exact.view(rows, -1, group).abs().amax(-1)
    assert bool((scales.double() <= torch.where(largest > 0, largest / 7 * (1 + 2**-6), 1.0)).all())


@few
@given(matrices(), st.sampled_from([8, 16]))
def test_the_scale_is_no_worse_than_those_of_the_usual_formulas(weight: torch.Tensor, group: int) -> None:
    groups = weight.float().view(weight.shape[0], -1, group)
    largest = groups.abs().amax(-1, keepdim=True)

    def error(scales: torch.Tensor) -> torch.Tensor:
        scales = torch.where(largest > 0, scales, 1.0).bfloat16().float()
        values = (groups / scales).round().clamp(-8, 7) * scales
        return (values.bfloat16().float() - groups).square().sum(-1)

    found = int4.dequantize(*int4.quantize(weight, group)).bfloat16().float().view(groups.shape)
    ours = (found - groups).square().sum(-1)
    assert bool((ours <= error(largest / 7) * (1 + 1e-5)).all())
    # On average over many groups, each by its own magnitude: one large group would be all of their sum.
    usual, squares = error(largest / 7.5), largest.squeeze(-1).square().clamp(min=torch.finfo(torch.float32).tiny)
    assert (ours / squares).sum() <= (usual / squares).sum() * (1 + 1e-5) or groups.numel() < 2000


@few
@given(on_a_grid())
def test_weights_that_were_read_in_bfloat16_keep_every_value(pair: Pair) -> None:
    """Not every bit of the scales: where all values are small, two of them may stand for the same weights."""
    packed, scales = pair
    group = 8 * packed.shape[1] // scales.shape[1]
    read = int4.dequantize(packed, scales).bfloat16()
    assert torch.equal(int4.dequantize(*int4.quantize(read, group)).bfloat16(), read)


@few
@given(matrices(), st.integers(1, 2_000))
def test_chunks_do_not_matter(weight: torch.Tensor, chunk: int) -> None:
    whole, parts = int4.quantize(weight, 8), int4.quantize(weight, 8, chunk=chunk)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])


def test_zeros_stay_zeros_and_numbers_that_are_not_finite_stay_so() -> None:
    weight = torch.zeros(3, 16)
    weight[1, 3], weight[2, 9] = float("nan"), float("-inf")
    packed, scales = int4.quantize(weight, 8)
    read = int4.dequantize(packed, scales)
    assert scales[0].tolist() == [1.0, 1.0] and not bool(read[0].any())
    assert not bool(read[1, 3].isfinite()) and not bool(read[2, 9].isfinite())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    stored = {"plain.weight": torch.randn(7, 9).bfloat16()}
    for name, scale_dtype, shape_dtype in (("a", torch.bfloat16, torch.int64), ("b", torch.float32, torch.int32)):
        packed, scales = int4.quantize(torch.randn(20, 96).bfloat16(), 32, scale_dtype=scale_dtype)
        stored[f"{name}.weight_packed"], stored[f"{name}.weight_scale"] = packed, scales
        stored[f"{name}.weight_shape"] = torch.tensor([20, 96], dtype=shape_dtype)
    save_file(stored, tmp_path / "model.safetensors")
    return tmp_path


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_what_a_checkpoint_holds_comes_back_from_reading_it(checkpoint: Path) -> None:
    form, stored = Int4Form(checkpoint, Int4Groups(32)), tensors(checkpoint)
    source = HfSource(checkpoint, {"quantization_config": config()})
    assert {name: (info.dtype, info.shape) for name, info in source.tensors.items()} == {
        "a.weight": ("BF16", (20, 96)), "b.weight": ("BF16", (20, 96)), "plain.weight": ("BF16", (7, 9)),
    }  # fmt: skip
    read = {name: source.load(name) for name in source.tensors}
    exact = int4.dequantize(stored["a.weight_packed"], stored["a.weight_scale"])
    assert torch.equal(read["a.weight"], exact.bfloat16())
    for rows in (slice(0, 20), slice(3, 11)):
        for columns in (slice(0, 96), slice(32, 64), slice(5, 70), slice(95, 96), slice(4, 4)):
            part = torch.full((rows.stop - rows.start, columns.stop - columns.start), float("nan"))
            source.read("a.weight", (rows, columns), part)
            assert torch.equal(part, exact.bfloat16().float()[rows, columns])
    source.close()
    found = dict(form.quantized(iter(read.items())))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {n: (t.dtype, t.shape) for n, t in stored.items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items() if not name.startswith("b."))
    assert list(found)[:3] == ["a.weight_packed", "a.weight_scale", "a.weight_shape"]
    sizes = {name: tensor.numel() for name, tensor in read.items()}
    assert form.num_bytes(sizes, torch.bfloat16) == sum(tensor.nbytes for tensor in stored.values())
    with pytest.raises(InvalidFile, match=r"a\.weight: the checkpoint has \[20, 96\], the model \[96, 20\]"):
        list(form.quantized(iter([("a.weight", torch.zeros(96, 20))])))


def test_a_conversion_writes_plain_weights(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": config()}))
    target = hf_to_hf.convert(checkpoint, tmp_path / "plain")
    assert json.loads((target / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}
    assert {name: tensor.dtype for name, tensor in tensors(target).items()} == dict.fromkeys(
        ("a.weight", "b.weight", "plain.weight"), torch.bfloat16
    )


def test_the_config_says_how_weights_are_quantized() -> None:
    assert updatable({"quantization_config": config()}, "M") == Int4Groups(32)
    assert updatable({"quantization_config": config(group_size=128, type="int")}, "M") == Int4Groups(128)
    mixed = config()
    mixed["config_groups"]["group_1"] = config(group_size=128)["config_groups"]["group_0"]
    fp8 = config()
    fp8["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    others = [config(**change) for change in (
        {"symmetric": False}, {"num_bits": 8}, {"type": "float"}, {"strategy": "channel", "group_size": None},
        {"actorder": "group"}, {"group_size": 12}, {"dynamic": True},
    )]  # fmt: skip
    for other in [*others, mixed, fp8, config() | {"format": "marlin-24"}, config() | {"config_groups": None}]:
        assert group_size(other) is None
        with pytest.raises(NotAvailable, match=r"^M with quantization_config .* symmetric INT4 in groups, not to"):
            updatable({"quantization_config": other}, "M")


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"a.weight_scale": None}, InvalidFile, r"weight_packed is int4 and has no a\.weight_scale for groups of 32"),
        ({"a.weight_scale": torch.ones(2, 4)}, InvalidFile, "for groups of 32"),
        ({"a.weight_shape": None}, InvalidFile, r"no a\.weight_shape"),
        ({"a.weight_scale": torch.ones(4, 2).half()}, NotAvailable, "a.weight_scale of dtype F16"),
        ({"a.weight_packed": None}, InvalidFile, "none of its weights is packed"),
    ],
)
def test_a_checkpoint_whose_form_is_unclear_is_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], error: type[Exception], reason: str
) -> None:
    stored = {
        "a.weight_packed": torch.zeros(4, 8, dtype=torch.int32), "a.weight_scale": torch.ones(4, 2),
        "a.weight_shape": torch.tensor([4, 64]),
    } | changes  # fmt: skip
    save_file({name: t for name, t in stored.items() if t is not None}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config()}))
    with pytest.raises(error, match=reason):
        form_of(tmp_path)
