"""Maps the parameters of a Megatron model to the tensors of a Hugging Face checkpoint.

A `Parameter` is one Megatron parameter, whole (no tensor parallelism), under its name in a `GPTModel` of local layers
with global layer and expert numbers: `decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight`. It is made of
`Block`s, rectangles that are cut out of Hugging Face tensors. Tables of parameters, one per family, are in `families/`.
Loading, exporting, checkpoint conversion and weight sync all ask `Parameter.slices` which part of which tensor a rank
holds, so no layout is written down twice.

    local[piece.index] = hugging_face[piece.hf_index]        load
    hugging_face[piece.hf_index] = local[piece.index]        export
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from slime.converters.files.rectangles import Index, Shape
from slime.types.errors import InvalidField


@dataclasses.dataclass(frozen=True)
class Block:
    """A rectangle of `size` elements that begins at `source` in the Hugging Face tensor `name` [shape], and at `target`
    in the Megatron parameter.

    lead: the place in leading dimensions that only the Hugging Face tensor has, which may hold all experts of a layer.
    """

    name: str
    shape: Shape
    source: Shape
    target: Shape
    size: Shape
    lead: Shape = ()


@dataclasses.dataclass(frozen=True)
class Slice:
    """The part that a rank's shard of a Megatron parameter and a Hugging Face tensor have in common.

    `hf_index` may have more dimensions in front, of one place each.
    """

    hf_name: str
    hf_shape: Shape
    hf_index: Index
    index: Index

    @property
    def num_elements(self) -> int:
        return math.prod(part.stop - part.start for part in self.index)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One Megatron parameter.

    split: the dimension that tensor parallelism cuts, None for a copy on every rank.
    stacks: number of equal parts along dimension 0, each cut by itself (2: a rank's gate and its up projection).
    padded: the vocabulary is dimension 0; a model may have more rows than `shape`, zeros that belong to no token.
    """

    name: str
    shape: Shape
    blocks: tuple[Block, ...]
    split: int | None = None
    stacks: int = 1
    padded: bool = False

    @property
    def is_expert(self) -> bool:
        """Returns whether it is placed by expert and expert tensor parallelism in place of tensor parallelism."""
        return ".local_experts." in self.name

    def at(self, prefix: str, hf_prefix: str) -> Parameter:
        """Returns a copy with prefixes before its name and those of its Hugging Face tensors."""
        blocks = tuple(dataclasses.replace(block, name=hf_prefix + block.name) for block in self.blocks)
        return dataclasses.replace(self, name=prefix + self.name, blocks=blocks)

    def local_shape(self, size: int, padded_rows: int | None = None) -> Shape:
        """Returns the shape of a shard that `size` ranks share. Raises InvalidField where they cannot."""
        shape = list(self.shape)
        if self.padded and padded_rows is not None:
            shape[0] = padded_rows
        if self.split is None:
            return tuple(shape)
        parts = size * (self.stacks if self.split == 0 else 1)
        if shape[self.split] % parts:
            raise InvalidField(self.name, shape[self.split], f"a multiple of {parts} in dimension {self.split}")
        shape[self.split] //= size
        return tuple(shape)

    def slices(self, rank: int = 0, size: int = 1, padded_rows: int | None = None) -> Iterator[Slice]:
        """Yields the parts of Hugging Face tensors in the shard of `rank` of `size` tensor-parallel ranks.

        padded_rows: rows of a padded vocabulary, all ranks together. Every element of the shard is in at most one
        slice; those in none are padding.
        """
        for local, start, length in self._runs(rank, size, padded_rows):
            for block in self.blocks:
                piece = self._common(block, local, start, length)
                if piece is not None:
                    yield piece

    def slices_of_rows(self, rows: slice) -> Iterator[Slice]:
        """Yields the parts of Hugging Face tensors in rows of the whole; `index` counts from the first of them."""
        for piece in self.slices():
            lead = len(piece.hf_index) - len(piece.index)
            whole_rows, hf_rows = piece.index[0], piece.hf_index[lead]
            first, last = max(whole_rows.start, rows.start), min(whole_rows.stop, rows.stop)
            if first < last:
                shift = hf_rows.start - whole_rows.start
                yield dataclasses.replace(
                    piece,
                    hf_index=(
                        *piece.hf_index[:lead],
                        slice(first + shift, last + shift),
                        *piece.hf_index[lead + 1 :],
                    ),
                    index=(slice(first - rows.start, last - rows.start), *piece.index[1:]),
                )

    def _runs(self, rank: int, size: int, padded_rows: int | None) -> Iterator[tuple[int, int, int]]:
        """Yields (start in the shard, start in the whole, length) along the split dimension."""
        if self.split is None:
            yield 0, 0, self.shape[0]
            return
        stacks = self.stacks if self.split == 0 else 1
        length = self.local_shape(size, padded_rows)[self.split] // stacks
        for stack in range(stacks):
            yield stack * length, (stack * size + rank) * length, length

    def _common(self, block: Block, local: int, start: int, length: int) -> Slice | None:
        split = self.split or 0
        first = max(start, block.target[split])
        last = min(start + length, block.target[split] + block.size[split])
        if first >= last:
            return None
        source, target, size = list(block.source), list(block.target), list(block.size)
        source[split] += first - block.target[split]
        target[split] = local + first - start
        size[split] = last - first
        lead = tuple(slice(place, place + 1) for place in block.lead)
        return Slice(block.name, block.shape, lead + _index(source, size), _index(target, size))


def _index(start: list[int], size: list[int]) -> Index:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def copy(
    name: str, hf_name: str, shape: Shape, *, split: int | None = None, stacks: int = 1, padded: bool = False
) -> Parameter:
    """Takes the Hugging Face tensor as it is; stacks: number of equal parts that it already has along dimension 0."""
    zero = (0,) * len(shape)
    block = Block(hf_name, shape, zero, zero, shape)
    return Parameter(name, shape, (block,), split=split, stacks=stacks, padded=padded)


def stack(name: str, hf_names: tuple[str, ...], shape: Shape) -> Parameter:
    """Concatenates tensors of the same `shape` along dimension 0, as the gate and up projections of a gated MLP."""
    zero = (0,) * len(shape)
    blocks = tuple(Block(hf_name, shape, zero, (i * shape[0], *zero[1:]), shape) for i, hf_name in enumerate(hf_names))
    return Parameter(name, (len(hf_names) * shape[0], *shape[1:]), blocks, split=0, stacks=len(hf_names))


def swapped(name: str, hf_name: str, shape: Shape, *, split: int | None = None) -> Parameter:
    """Takes the Hugging Face matrix with the halves of its columns swapped."""
    rows, columns = shape
    left, right, size = (0, 0), (0, columns // 2), (rows, columns // 2)
    blocks = (Block(hf_name, shape, right, left, size), Block(hf_name, shape, left, right, size))
    return Parameter(name, shape, blocks, split=split)


def qkv(
    name: str, hf_names: tuple[str, str, str], *, heads: int, groups: int, head_dim: int, columns: int | None
) -> Parameter:
    """Interleaves queries, keys and values by query group: queries, key and value of group 0, then those of group 1.

    heads: query heads; groups: key and value heads; columns: None for biases.
    """
    rest: Shape = () if columns is None else (columns,)
    rows = (heads // groups * head_dim, head_dim, head_dim)
    zero = (0,) * len(rest)
    blocks = []
    for group in range(groups):
        target = group * sum(rows)
        for hf_name, length in zip(hf_names, rows, strict=True):
            blocks.append(
                Block(hf_name, (groups * length, *rest), (group * length, *zero), (target, *zero), (length, *rest))
            )
            target += length
    return Parameter(name, (groups * sum(rows), *rest), tuple(blocks), split=0)
