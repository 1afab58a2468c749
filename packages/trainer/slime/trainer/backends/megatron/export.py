"""Whole Hugging Face tensors on the first rank, gathered in buckets from the ranks that hold their parts.

Every part travels once. No rank holds more than its own model and one bucket; the first rank, that and the bucket's
whole tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.converters.mapping import Index, Shape
from slime.trainer.collective import Ranks
from slime.types.errors import InvalidField

# (Hugging Face name, shape, the part of it, that part): what a rank has of a tensor.
Part = tuple[str, Shape, Index, Tensor]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of tensor `name` that `rank` has, the `number`-th of its own."""

    rank: int
    number: int
    index: Index

    @property
    def shape(self) -> Shape:
        return tuple(part.stop - part.start for part in self.index)


def gather_to_first(
    parts: Sequence[Part], order: Mapping[str, Shape], ranks: Ranks, device: torch.device, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in `order`; the tensors are whole on rank 0 and empty on others. Collective.

    parts: of this rank; no element of a tensor is on two ranks. Raises InvalidField for a tensor of which a part is on
    none, on every rank alike.
    """
    pieces: dict[str, list[_Piece]] = {name: [] for name in order}
    dtypes: dict[str, torch.dtype] = {}
    described = [
        [name, str(tensor.dtype).removeprefix("torch."), [[p.start, p.stop] for p in index]]
        for name, _, index, tensor in parts
    ]
    for rank, of_rank in enumerate(ranks.gather(described)):
        for number, (name, dtype, index) in enumerate(of_rank):
            pieces[name].append(_Piece(rank, number, tuple(slice(a, b) for a, b in index)))
            dtypes[name] = getattr(torch, dtype)
    for name, shape in order.items():
        held = sum(math.prod(piece.shape) for piece in pieces[name])
        if held != math.prod(shape):
            raise InvalidField(name, held, f"{math.prod(shape)} elements, all ranks together")
    for names in _buckets(order, dtypes, bucket_bytes):
        yield from _gather(names, pieces, parts, order, ranks, device, dtypes[names[0]])


def _buckets(order: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], max_bytes: int) -> Iterator[list[str]]:
    """Names in order, of one dtype each."""
    bucket: list[str] = []
    size = 0
    for name, shape in order.items():
        bytes_ = math.prod(shape) * dtypes[name].itemsize
        if bucket and (size + bytes_ > max_bytes or dtypes[name] != dtypes[bucket[0]]):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += bytes_
    if bucket:
        yield bucket


def _gather(
    names: list[str],
    pieces: Mapping[str, list[_Piece]],
    parts: Sequence[Part],
    order: Mapping[str, Shape],
    ranks: Ranks,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    by_rank: dict[int, list[tuple[str, _Piece]]] = {}
    for name in names:
        for piece in pieces[name]:
            by_rank.setdefault(piece.rank, []).append((name, piece))
    if ranks.rank != 0:
        mine = by_rank.get(ranks.rank, [])
        if mine:
            dist.send(torch.cat([parts[piece.number][3].detach().flatten() for _, piece in mine]), 0)
        yield from ((name, torch.empty(0)) for name in names)
        return
    flat = {
        rank: torch.empty(sum(math.prod(piece.shape) for _, piece in of_rank), dtype=dtype, device=device)
        for rank, of_rank in by_rank.items()
        if rank != 0
    }
    arrivals = [dist.irecv(buffer, rank) for rank, buffer in flat.items()]
    whole = {name: torch.empty(order[name], dtype=dtype, device=device) for name in names}
    for name, piece in by_rank.get(0, []):
        whole[name][piece.index] = parts[piece.number][3].detach()
    for arrival in arrivals:
        arrival.wait()
    for rank, buffer in flat.items():
        filled = 0
        for name, piece in by_rank[rank]:
            size = math.prod(piece.shape)
            whole[name][piece.index] = buffer[filled : filled + size].view(piece.shape)
            filled += size
    yield from whole.items()
