"""Reads the samples of a group: from its template until something is stored, then from its payload."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate

from slime.buffer.store.base import Group, Payloads, State
from slime.types.errors import DataLoss
from slime.v1 import sample_pb2


def samples_of(group: Group, payloads: Payloads) -> list[sample_pb2.Sample]:
    """Returns the samples of a group; none if its payload was released. Raises DataLoss if they are damaged."""
    if group.payload is not None:
        parts = encoded_samples(group, payloads, range(len(group.sizes)))
        return [sample_pb2.Sample.FromString(part) for part in parts]
    if group.state is State.COMMITTED:
        return []
    return expand(group.template, group.group_index, range(group.first_sample, group.first_sample + group.num_samples))


def expand(template: bytes, group_index: int, indexes: Iterable[int]) -> list[sample_pb2.Sample]:
    """Returns a copy of the sample in `template` for each of the sample indexes."""
    samples = []
    for index in indexes:
        sample = sample_pb2.Sample.FromString(template)
        sample.group_index = group_index
        sample.index = index
        samples.append(sample)
    return samples


def encoded_samples(group: Group, payloads: Payloads, positions: Sequence[int]) -> list[bytes]:
    """Returns encoded samples at `positions` of a group that has a payload. Raises DataLoss if they are damaged."""
    assert group.payload is not None
    offsets = [0, *accumulate(group.sizes)]
    parts = payloads.read(group.payload, [(offsets[position], group.sizes[position]) for position in positions])
    if group.checksums:
        for position, part in zip(positions, parts, strict=True):
            if zlib.crc32(part) != group.checksums[position]:
                raise DataLoss(
                    f"payload {group.payload} of group {group.group_index}: sample {position} is not what was stored",
                    field="payload",
                    value=group.payload,
                    expected=f"bytes with the CRC-32 {group.checksums[position]:08x}",
                )
    return parts


def group_message(group: Group, samples: Iterable[sample_pb2.Sample]) -> sample_pb2.SampleGroup:
    return sample_pb2.SampleGroup(group_index=group.group_index, dataset=group.dataset, samples=samples)
