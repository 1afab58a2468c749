"""Checks that a worker completes the group that it leased, and that every sample is valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime.buffer.store.base import Group
from slime.types import Sample
from slime.types.codec import sample_from_proto
from slime.types.errors import InvalidField, counted
from slime.types.sample.validate import (
    is_untrainable,
    reward_is_finite,
    validate_finished,
    validate_sample,
    validate_samples,
)
from slime.v1 import sample_pb2

# Decoding a group with more samples would hold up every other call.
MAX_SAMPLES = 16384


@dataclass(frozen=True)
class CompletionRules:
    """Rules for finished samples that the trainer of one run adds to those of every trainer.

    scalar_reward: the reward, or its entry `reward_key`, is a number. vocab_size: token ids are below it.
    log_probs_required: every sample that is trained on has the engine's log-probs. text_only: samples have no images.
    nuclei: every token that is trained on has its nucleus ("required"), no sample has any ("refused"), or "any".
    """

    reward_required: bool = True
    scalar_reward: bool = False
    reward_key: str | None = None
    vocab_size: int | None = None
    log_probs_required: bool = False
    text_only: bool = False
    nuclei: str = "any"


ANY_TRAINER = CompletionRules()


def check_samples(
    group: Group, messages: Sequence[sample_pb2.Sample], *, finished: bool, rules: CompletionRules = ANY_TRAINER
) -> list[Sample]:
    """Returns the decoded samples. Raises InvalidField naming the sample, the field, the position in it and the value.

    Each sample carries the group's index and the index of a leased sample; every leased index occurs. An index may
    occur more than once if a trajectory fanned out into several samples, which then share a rollout_id.

    finished: whether the samples are complete; samples that are given back may lack status, reward and response.
    A finished sample that is FAILED or removed and has no finite reward is marked as removed in its message and loses
    that reward, so that nothing that is computed over rewards includes it.
    """
    if len(messages) > MAX_SAMPLES:
        raise InvalidField("samples", len(messages), f"at most {MAX_SAMPLES} samples in a group")
    samples: list[Sample] = []

    def decode(message: sample_pb2.Sample) -> None:
        sample = sample_from_proto(message, copy=False, check_types=True)
        if finished:
            validate_finished(sample, reward_required=rules.reward_required)
            _drop_useless_reward(message, sample)
            _check_scalar_reward(sample, rules)
            _check_for_the_model(sample, rules)
        else:
            validate_sample(sample)
        samples.append(sample)

    validate_samples(messages, decode)
    _check_indexes(group, samples)
    return samples


def _drop_useless_reward(message: sample_pb2.Sample, sample: Sample) -> None:
    if is_untrainable(sample) and not reward_is_finite(sample.reward):
        message.ClearField("reward_value")
        message.ClearField("reward_json")
        sample.reward = None
        message.remove_sample = sample.remove_sample = True


def _check_scalar_reward(sample: Sample, rules: CompletionRules) -> None:
    reward = sample.reward
    if not rules.scalar_reward or not isinstance(reward, dict):
        return
    if rules.reward_key is None:
        raise InvalidField("reward", reward, "a number, or --reward-key to say which key of the reward is trained on")
    value = reward.get(rules.reward_key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidField(f"reward.{rules.reward_key}", value, "a number, because --reward-key selects it")


def _check_for_the_model(sample: Sample, rules: CompletionRules) -> None:
    tokens = sample.array("tokens")
    if rules.vocab_size is not None and tokens.size and tokens.item(tokens.argmax()) >= rules.vocab_size:
        position = int(np.argmax(tokens >= rules.vocab_size))
        raise InvalidField(f"tokens[{position}]", int(tokens[position]), f"ids in [0, {rules.vocab_size})")
    if rules.text_only and (sample.multimodal_inputs or sample.multimodal_train_inputs):
        raise InvalidField("multimodal_train_inputs", "given", "nothing: the model of this run reads text only")
    if rules.nuclei != "any" and not is_untrainable(sample):
        _check_nuclei(sample, rules)
    if rules.log_probs_required and sample.array("rollout_log_probs") is None and not is_untrainable(sample):
        raise InvalidField("rollout_log_probs", None, "the engine's log-probs, which the trainer of this run reads")


def _check_nuclei(sample: Sample, rules: CompletionRules) -> None:
    ids, offsets = sample.array("rollout_top_p_token_ids"), sample.array("rollout_top_p_token_offsets")
    if rules.nuclei == "refused" and ids is not None and ids.size:
        raise InvalidField(
            "rollout_top_p_token_ids", counted(ids.size, "id"),
            "none: without --rollout-top-p the trainer scores tokens over the whole vocabulary",
        )  # fmt: skip
    mask = sample.array("loss_mask")
    trained = np.ones(sample.response_length) if mask is None else mask
    if rules.nuclei != "required" or not trained.any():
        return
    if ids is None or offsets is None:
        raise InvalidField(
            "rollout_top_p_token_ids", None,
            "the nucleus of each token, over which this run scores it: pass the meta_info of the engine's answer to "
            "append_response_tokens",
        )  # fmt: skip
    if (empty := np.flatnonzero((np.diff(offsets) == 0) & (trained > 0))).size:
        raise InvalidField(
            f"rollout_top_p_token_offsets[{int(empty[0])}]", "an empty nucleus",
            "the tokens that the trained token was sampled from",
        )  # fmt: skip
    if rules.vocab_size is not None and ids.size and ids.max() >= rules.vocab_size:
        position = int(np.argmax(ids >= rules.vocab_size))
        raise InvalidField(
            f"rollout_top_p_token_ids[{position}]", int(ids[position]), f"ids in [0, {rules.vocab_size})"
        )


def _check_indexes(group: Group, samples: Sequence[Sample]) -> None:
    leased = range(group.first_sample, group.first_sample + group.num_samples)
    rollout_ids: dict[int, list[int | None]] = {}
    for position, sample in enumerate(samples):
        if sample.group_index != group.group_index:
            raise InvalidField(f"samples[{position}].group_index", sample.group_index, str(group.group_index))
        if sample.index is None or sample.index not in leased:
            raise InvalidField(f"samples[{position}].index", sample.index, f"one of {leased[0]} to {leased[-1]}")
        rollout_ids.setdefault(sample.index, []).append(sample.rollout_id)
    missing = [index for index in leased if index not in rollout_ids]
    if missing:
        raise InvalidField("samples", sorted(rollout_ids), f"every leased index: {missing} missing")
    for index, ids in rollout_ids.items():
        if len(ids) > 1 and (None in ids or len(set(ids)) > 1):
            raise InvalidField(
                "rollout_id",
                ids,
                f"one id shared by the {counted(len(ids), 'sample')} of index {index}: they are one trajectory",
            )
