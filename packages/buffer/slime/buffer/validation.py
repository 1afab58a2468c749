"""What a worker hands in must be the group that it leased, and every sample must be whole."""

from __future__ import annotations

from collections.abc import Sequence

from slime.buffer.store.base import Group
from slime.types import Sample
from slime.types.codec import sample_from_proto
from slime.types.errors import InvalidField
from slime.v1 import sample_pb2


def check_samples(group: Group, messages: Sequence[sample_pb2.Sample]) -> list[Sample]:
    """The decoded samples. Raises InvalidField naming the sample and the field.

    Each sample carries the group's index and the index of one that was leased; each leased index is there. An index may
    come more than once, where one prompt fanned out into several samples: these share a rollout_id.
    """
    leased = range(group.first_sample, group.first_sample + group.num_samples)
    rollouts: dict[int, list[int | None]] = {}
    samples = []
    for position, message in enumerate(messages):
        try:
            sample = sample_from_proto(message, copy=False)
            sample.validate()
        except InvalidField as error:
            place = f"samples[{position}]"
            raise InvalidField(
                f"{place}.{error.field}", error.value, error.expected, f"{place}: {error.message}"
            ) from None
        if sample.group_index != group.group_index:
            raise InvalidField(f"samples[{position}].group_index", sample.group_index, str(group.group_index))
        if sample.index is None or sample.index not in leased:
            raise InvalidField(f"samples[{position}].index", sample.index, f"one of {leased[0]} to {leased[-1]}")
        rollouts.setdefault(sample.index, []).append(sample.rollout_id)
        samples.append(sample)
    missing = [index for index in leased if index not in rollouts]
    if missing:
        raise InvalidField("samples", sorted(rollouts), f"every leased index: {missing} missing")
    for index, ids in rollouts.items():
        if len(ids) > 1 and (None in ids or len(set(ids)) > 1):
            raise InvalidField(
                "rollout_id", ids, f"one id shared by the {len(ids)} samples of index {index}: they are one rollout"
            )
    return samples
