from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.converters.families.mapping import Parameter, copy, qkv, stack, swapped
from slime.types.errors import InvalidField

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def parameters(draw: st.DrawFn) -> Parameter:
    """One of every constructor, in any shape."""
    kind = draw(st.sampled_from(["copy", "fused", "stack", "swapped", "qkv", "bias"]))
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    if kind == "copy":
        split = draw(st.sampled_from([None, 0, 1]))
        return copy("m", "hf", (rows, columns), split=split, padded=split == 0 and draw(st.booleans()))
    if kind == "fused":
        return copy("m", "hf", (2 * rows, columns), split=0, stacks=2)
    if kind == "stack":
        return stack("m", ("gate", "up"), (rows, columns))
    if kind == "swapped":
        return swapped("m", "hf", (rows, 2 * columns), split=draw(st.sampled_from([None, 0])))
    groups, per_group, width = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return qkv(
        "m",
        ("q", "k", "v"),
        heads=groups * per_group,
        groups=groups,
        head_dim=width,
        columns=columns if kind == "qkv" else None,
    )


def sizes_of(parameter: Parameter, size: int) -> tuple[int, int | None]:
    """(the size or 1 where it does not divide the parameter, padded rows)."""
    padded = -(-parameter.shape[0] // size) * size if parameter.padded else None
    try:
        parameter.local_shape(size, padded)
    except InvalidField:
        return 1, padded
    return size, padded


def hf_shapes(parameter: Parameter) -> dict[str, tuple[int, ...]]:
    return {block.name: block.shape for block in parameter.blocks}


def numbered(parameter: Parameter) -> dict[str, torch.Tensor]:
    """Hugging Face tensors in which no two elements are the same, none is 0."""
    tensors, first = {}, 1
    for name, shape in hf_shapes(parameter).items():
        tensors[name] = torch.arange(first, first + math.prod(shape)).reshape(shape)
        first += math.prod(shape)
    return tensors


def load(
    parameter: Parameter, tensors: dict[str, torch.Tensor], rank: int, size: int, padded: int | None
) -> torch.Tensor:
    shard = torch.zeros(parameter.local_shape(size, padded), dtype=torch.int64)
    for piece in parameter.slices(rank, size, padded):
        shard[piece.index] = tensors[piece.hf_name][piece.hf_index]
    return shard


@given(parameters(), SIZES)
def test_all_ranks_together_hold_every_hugging_face_element_once(parameter: Parameter, size: int) -> None:
    size, padded = sizes_of(parameter, size)
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in hf_shapes(parameter).items()}
    for rank in range(size):
        for piece in parameter.slices(rank, size, padded):
            counts[piece.hf_name][piece.hf_index] += 1
    copies = size if parameter.split is None else 1
    for name, count in counts.items():
        assert (count == copies).all(), name


@given(parameters(), SIZES)
def test_a_shard_is_filled_once_but_for_its_padding(parameter: Parameter, size: int) -> None:
    size, padded = sizes_of(parameter, size)
    empty = 0
    for rank in range(size):
        filled = torch.zeros(parameter.local_shape(size, padded), dtype=torch.int64)
        for piece in parameter.slices(rank, size, padded):
            filled[piece.index] += 1
            assert piece.num_elements == filled[piece.index].numel()
            assert piece.hf_shape == hf_shapes(parameter)[piece.hf_name]
        assert filled.max() <= 1
        empty += int((filled == 0).sum())
    rows = 0 if padded is None else padded - parameter.shape[0]
    assert empty == rows * math.prod(parameter.shape[1:])


@given(parameters(), SIZES)
def test_what_was_loaded_exports_as_it_was(parameter: Parameter, size: int) -> None:
    size, padded = sizes_of(parameter, size)
    tensors = numbered(parameter)
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(size):
        shard = load(parameter, tensors, rank, size, padded)
        for piece in parameter.slices(rank, size, padded):
            back[piece.hf_name][piece.hf_index] = shard[piece.index]
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


@given(parameters(), SIZES)
def test_shards_are_the_cut_of_the_whole(parameter: Parameter, size: int) -> None:
    """Cuts as Megatron does: equal chunks along the split dimension, of each stack by itself."""
    size, padded = sizes_of(parameter, size)
    tensors = numbered(parameter)
    whole = load(parameter, tensors, 0, 1, padded)
    for rank in range(size):
        expected = whole
        if parameter.split is not None:
            stacks = whole.chunk(parameter.stacks, 0) if parameter.stacks > 1 else [whole]
            expected = torch.cat([part.chunk(size, parameter.split)[rank] for part in stacks])
        assert torch.equal(load(parameter, tensors, rank, size, padded), expected)


def test_padded_rows_are_zeros_on_the_last_rank() -> None:
    parameter = copy("embedding", "embed", (5, 2), split=0, padded=True)
    tensors = {"embed": torch.arange(1, 11).reshape(5, 2)}
    shards = [load(parameter, tensors, rank, 2, 8) for rank in range(2)]
    assert [shard.tolist() for shard in shards] == [
        [[1, 2], [3, 4], [5, 6], [7, 8]],
        [[9, 10], [0, 0], [0, 0], [0, 0]],
    ]


def test_queries_keys_and_values_lie_by_group() -> None:
    parameter = qkv("qkv", ("q", "k", "v"), heads=4, groups=2, head_dim=1, columns=None)
    tensors = {"q": torch.tensor([1, 2, 3, 4]), "k": torch.tensor([5, 6]), "v": torch.tensor([7, 8])}
    assert load(parameter, tensors, 0, 1, None).tolist() == [1, 2, 5, 7, 3, 4, 6, 8]
    assert load(parameter, tensors, 1, 2, None).tolist() == [3, 4, 6, 8]


def test_a_rank_has_its_gate_over_its_up_projection() -> None:
    tensors = {"gate": torch.tensor([[1], [2]]), "up": torch.tensor([[3], [4]])}
    assert load(stack("fc1", ("gate", "up"), (2, 1)), tensors, 1, 2, None).tolist() == [[2], [4]]
    fused = copy("fc1", "gate_up", (4, 1), split=0, stacks=2)
    assert load(fused, {"gate_up": torch.tensor([[1], [2], [3], [4]])}, 1, 2, None).tolist() == [[2], [4]]


def test_halves_of_columns_change_places() -> None:
    parameter = swapped("eh_proj", "input_proj", (2, 4), split=0)
    tensors = {"input_proj": torch.arange(8).reshape(2, 4)}
    assert load(parameter, tensors, 0, 1, None).tolist() == [[2, 3, 0, 1], [6, 7, 4, 5]]
    assert load(parameter, tensors, 1, 2, None).tolist() == [[6, 7, 4, 5]]


def test_names_get_prefixes_on_both_sides() -> None:
    parameter = copy("mlp.linear_fc2.weight", "mlp.down_proj.weight", (2, 2)).at("decoder.layers.7.", "model.layers.7.")
    assert parameter.name == "decoder.layers.7.mlp.linear_fc2.weight"
    assert [block.name for block in parameter.blocks] == ["model.layers.7.mlp.down_proj.weight"]


@pytest.mark.parametrize(
    ("parameter", "size"),
    [
        (copy("m", "hf", (6, 4), split=0), 4),
        (copy("m", "hf", (6, 5), split=1), 2),
        (stack("m", ("a", "b"), (3, 4)), 2),
        (copy("m", "hf", (5, 4), split=0, padded=True), 2),
    ],
)
def test_ranks_that_cannot_share_a_parameter_are_an_error_that_names_it(parameter: Parameter, size: int) -> None:
    with pytest.raises(InvalidField) as raised:
        parameter.local_shape(size)
    assert raised.value.field == "m"
    assert "multiple of" in raised.value.expected


def test_only_experts_are_placed_by_expert_parallelism() -> None:
    assert copy("decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight", "hf", (2, 2)).is_expert
    assert not copy("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", "hf", (2, 2)).is_expert
