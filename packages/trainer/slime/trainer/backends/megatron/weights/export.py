"""Whole Hugging Face tensors on the first rank or on all, gathered in buckets from the ranks that hold their parts.

Every part travels once to each rank that needs it. A rank holds at most its own model, one bucket and, if it assembles
tensors, the whole tensors of that bucket.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime.converters.files.rectangles import Index, Shape
from slime.trainer.process.collective import Ranks
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


def gather(
    parts: Sequence[Part],
    order: Mapping[str, Shape],
    ranks: Ranks,
    device: torch.device,
    bucket_bytes: int,
    *,
    dtype: torch.dtype | None = None,
    everywhere: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of every tensor in `order`; whole on rank 0 and, unless `everywhere`, empty on others.
    Collective.

    parts: of this rank; no element of a tensor is on two ranks. dtype: of floating-point tensors, on their way too.
    Raises InvalidField for a tensor of which a part is on none, on every rank alike.
    """
    pieces: dict[str, list[_Piece]] = {name: [] for name in order}
    dtypes: dict[str, torch.dtype] = {}
    described = [
        [name, str(_wire_dtype(tensor, dtype)).removeprefix("torch."), [[p.start, p.stop] for p in index]]
        for name, _, index, tensor in parts
    ]
    for rank, of_rank in enumerate(ranks.gather(described)):
        for number, (name, wire, index) in enumerate(of_rank):
            pieces[name].append(_Piece(rank, number, tuple(slice(a, b) for a, b in index)))
            dtypes[name] = getattr(torch, wire)
    for name, shape in order.items():
        held = sum(math.prod(piece.shape) for piece in pieces[name])
        if held != math.prod(shape):
            raise InvalidField(name, held, f"{math.prod(shape)} elements, all ranks together")
    for names in _buckets(order, dtypes, bucket_bytes):
        by_rank: dict[int, list[tuple[str, _Piece]]] = {}
        for name in names:
            for piece in pieces[name]:
                by_rank.setdefault(piece.rank, []).append((name, piece))
        wire = dtypes[names[0]]
        own_parts = [parts[piece.number][3].detach() for _, piece in by_rank.get(ranks.rank, [])]
        flat = (
            _all_parts(by_rank, own_parts, ranks, device, wire)
            if everywhere
            else _on_first(by_rank, own_parts, ranks, device, wire)
        )
        if flat is None:
            yield from ((name, torch.empty(0)) for name in names)
            continue
        whole = {name: torch.empty(order[name], dtype=wire, device=device) for name in names}
        for (name, piece), part in zip(by_rank.get(ranks.rank, []), own_parts, strict=True):
            whole[name][piece.index] = part
        for rank, buffer in flat.items():
            _fill(whole, by_rank[rank], buffer)
        del flat, own_parts
        while whole:
            # No reference is kept here: the caller decides how long a tensor stays in memory.
            name = next(iter(whole))
            yield name, whole.pop(name)


def _wire_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _buckets(order: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], max_bytes: int) -> Iterator[list[str]]:
    """Yields lists of names, in order, of one dtype each."""
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


ByRank = Mapping[int, Sequence[tuple[str, _Piece]]]


def _on_first(
    by_rank: ByRank, own_parts: Sequence[Tensor], ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> dict[int, Tensor] | None:
    """Gathers on rank 0 what other ranks have, flat; None on those."""
    if ranks.rank != 0:
        if own_parts:
            dist.send(_flat(own_parts, dtype), 0)
        return None
    flat = {rank: _room(of_rank, device, dtype) for rank, of_rank in by_rank.items() if rank != 0}
    for arrival in [dist.irecv(buffer, rank) for rank, buffer in flat.items()]:
        arrival.wait()
    return flat


def _all_parts(
    by_rank: ByRank, own_parts: Sequence[Tensor], ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> dict[int, Tensor]:
    """Gathers on every rank what the others have, flat."""
    if ranks.world_size == 1:
        return {}
    flat = {}
    for rank, of_rank in sorted(by_rank.items()):
        buffer = _flat(own_parts, dtype) if rank == ranks.rank else _room(of_rank, device, dtype)
        dist.broadcast(buffer, rank)
        if rank != ranks.rank:
            flat[rank] = buffer
    return flat


def _flat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([part.to(dtype).flatten() for part in parts])


def _room(of_rank: Sequence[tuple[str, _Piece]], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(sum(math.prod(piece.shape) for _, piece in of_rank), dtype=dtype, device=device)


def _fill(whole: Mapping[str, Tensor], of_rank: Sequence[tuple[str, _Piece]], buffer: Tensor) -> None:
    filled = 0
    for name, piece in of_rank:
        size = math.prod(piece.shape)
        whole[name][piece.index] = buffer[filled : filled + size].view(piece.shape)
        filled += size
