"""Shares samples between the ranks of a replica.

One rank reads them from the buffer and sends them to the others, or each rank reads them, if the ranks of a node share
the large parts in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from slime.trainer.backends.base import Backend
from slime.trainer.process.collective import Ranks
from slime.types.codec import decode_sample, encode_sample
from slime.types.sample import Sample

ReadSamples = Callable[[Sequence[int]], Iterator[Sample]]


class ReplicaReader:
    """Reads samples for a replica. Collective, as every method is.

    each_reads: every rank reads by itself, because the ranks of a node share the large parts in memory.
    """

    def __init__(self, ranks: Ranks, backend: Backend, *, each_reads: bool = False) -> None:
        self._ranks = ranks
        self._backend = backend
        self._group: dist.ProcessGroup | None = None
        self._source = ranks.rank
        if ranks.world_size > backend.replicas and not each_reads:
            places = ranks.gather([backend.replica, backend.leads_replica])
            for replica in range(backend.replicas):
                members = [rank for rank, (number, _) in enumerate(places) if number == replica]
                group = dist.new_group(members, backend="gloo")
                if replica == backend.replica:
                    self._group = group
                    self._source = next(rank for rank in members if places[rank][1])

    def read(self, read: ReadSamples, positions: Sequence[int]) -> list[Sample]:
        """Reads the samples at `positions`, the same on every rank of a replica. An error on one is raised on all."""

        def fetch() -> list[Sample]:
            if not positions or self._source != self._ranks.rank:
                return []
            return [sample for _, sample in zip(positions, read(positions), strict=True)]

        samples = self._ranks.together(fetch)
        return samples if self._group is None else share(samples, self._ranks, self._source, self._group)


def share(samples: list[Sample], ranks: Ranks, source: int, group: dist.ProcessGroup) -> list[Sample]:
    """Returns the samples of rank `source`, on every rank of `group`, a group on the CPU. Called by all of `ranks`.

    Raises InvalidField, on all of them, for a sample that cannot travel.
    """
    sends = ranks.rank == source
    encoded = ranks.together(lambda: [encode_sample(sample) for sample in samples] if sends else [])
    count = torch.tensor([len(encoded)])
    dist.broadcast(count, source, group=group)
    sizes = torch.tensor([len(e) for e in encoded]) if encoded else torch.zeros(int(count), dtype=torch.int64)
    dist.broadcast(sizes, source, group=group)
    data = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    if encoded:
        data = torch.frombuffer(bytearray(b"".join(encoded)), dtype=torch.uint8)
    if len(data):
        dist.broadcast(data, source, group=group)
    if sends:
        return samples
    return [decode_sample(part.numpy().tobytes()) for part in data.split(sizes.tolist())] if len(sizes) else []
