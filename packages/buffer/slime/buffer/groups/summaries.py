"""Summarizes samples for the planner, once, when a group is completed."""

from __future__ import annotations

from collections.abc import Sequence

from slime.types import Sample
from slime.types.sample.validate import version_number
from slime.v1 import buffer_pb2, sample_pb2


def encode_summaries(messages: Sequence[sample_pb2.Sample], samples: Sequence[Sample]) -> bytes:
    """Returns an encoded SealStepResponse. Concatenating those of several groups gives that of all of them."""
    response = buffer_pb2.SealStepResponse()
    for message, sample in zip(messages, samples, strict=True):
        oldest, newest = weight_versions(sample)
        summary = response.samples.add(
            index=message.index,
            group_index=message.group_index,
            total_length=len(sample.array("tokens")),
            response_length=sample.response_length,
            loss_mask_sum=sample.effective_response_length,
            status=message.status,
            remove_sample=message.remove_sample,
            metadata_json=message.metadata_json,
            oldest_weight_version=oldest,
            newest_weight_version=newest,
            non_generation_time=message.non_generation_time,
        )
        if message.HasField("rollout_id"):
            summary.rollout_id = message.rollout_id
        match message.WhichOneof("reward"):
            case "reward_value":
                summary.reward_value = message.reward_value
            case "reward_json" if isinstance(sample.reward, dict):
                summary.reward_json = message.reward_json
            case "reward_json":
                # A float that a client sent as JSON, or an integer above 2**53.
                summary.reward_value = float(sample.reward)  # type: ignore[arg-type]
    return response.SerializeToString()


def oldest_of(samples: Sequence[Sample]) -> int | None:
    """Returns the oldest weight version of the tokens of all samples; None if they have none."""
    return min((oldest for sample in samples if (oldest := weight_versions(sample)[0]) >= 0), default=None)


def weight_versions(sample: Sample) -> tuple[int, int]:
    """Returns (oldest, newest) weight version of the tokens; (-1, -1) if none is a whole number."""
    if not (sample.spans or sample.weight_versions):
        return -1, -1
    named = [span.weight_version for span in sample.spans] or sample.weight_versions
    versions = [number for version in named if (number := version_number(version)) is not None]
    return (min(versions), max(versions)) if versions else (-1, -1)
