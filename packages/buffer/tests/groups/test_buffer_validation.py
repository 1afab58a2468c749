"""Groups that cannot be trained on are refused when a worker completes them, whatever client it uses."""

from __future__ import annotations

import math

import grpc
import numpy as np
import pytest
from buffer_samples import finish

from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.codec import sample_to_proto
from slime.types.errors import InvalidField
from slime.v1 import buffer_pb2, buffer_pb2_grpc


def send(client: BufferClient, call: str, token: str, samples: list[Sample]) -> None:
    """Completes or returns a group without the checks of the Python client, as a client in another language does."""
    request = getattr(buffer_pb2, f"{call}Request")(
        writer=client.writer.to_proto(), lease_token=token, samples=map(sample_to_proto, samples), commit=True
    )
    with grpc.insecure_channel(client.address) as channel:
        getattr(buffer_pb2_grpc.BufferServiceStub(channel), call)(iter([request]), timeout=60)


def test_what_is_given_back_is_checked_but_for_what_only_finished_samples_have(connected):
    client = connected()
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    (sample,) = finish(lease.group.samples)
    sample.status, sample.reward = Sample.Status.ABORTED, None
    with pytest.raises(grpc.RpcError, match=r"samples\[0\]\.status: got aborted") as error:
        send(client, "CompleteGroup", lease.token, [sample])
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    sample.rollout_log_probs[1] = math.nan  # type: ignore[index]
    with pytest.raises(grpc.RpcError, match=r"samples\[0\]\.rollout_log_probs\[1\]: got nan"):
        send(client, "ReturnGroup", lease.token, [sample])
    with pytest.raises(InvalidField, match=r"samples\[0\]\.rollout_log_probs\[1\]: got nan"):
        client.return_group(lease.token, [sample])
    sample.rollout_log_probs[1] = -1  # type: ignore[index]
    send(client, "ReturnGroup", lease.token, [sample])


@pytest.mark.parametrize("reward", [math.nan, None, {"score": math.inf}])
def test_a_failed_sample_without_a_finite_reward_is_left_out(connected, reward):
    client = connected(n_samples_per_prompt=2)
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    samples = finish(lease.group.samples)
    samples[1].status, samples[1].reward = Sample.Status.FAILED, reward
    client.complete_group(lease.token, samples)
    summaries = client.seal_step(0, 1)
    assert [(s.reward, s.remove_sample) for s in summaries] == [(1.0, False), (None, True)]
    assert [(s.reward, s.remove_sample) for s in client.read_step(0, [0, 1])] == [(1.0, False), (None, True)]


def test_a_reward_may_be_missing_where_the_buffer_is_told_so(connected):
    for allowed in (False, True):
        client = connected(allow_missing_rewards=allowed)
        client.add_prompts(["p"])
        (lease,) = client.lease_groups(1)
        (sample,) = finish(lease.group.samples)
        sample.reward = None
        if allowed:
            client.complete_group(lease.token, [sample])
        else:
            with pytest.raises(InvalidField, match=r"samples\[0\]\.reward: got None"):
                client.complete_group(lease.token, [sample])


def test_a_number_as_json_is_a_number_for_the_planner(connected):
    client = connected(n_samples_per_prompt=2)
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    samples = finish(lease.group.samples)
    samples[0].reward, samples[1].reward = 2**60, True
    client.complete_group(lease.token, samples)
    assert [s.reward for s in client.seal_step(0, 1)] == [2.0**60, 1.0]


def test_a_group_of_too_many_samples_is_refused_at_once(connected):
    client = connected()
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    removed = Sample(group_index=0, index=0, rollout_id=0, status=Sample.Status.FAILED, remove_sample=True)
    with pytest.raises(InvalidField, match="at most 16384 samples"):
        client.complete_group(lease.token, [removed] * 16385)


@pytest.mark.parametrize(
    ("key", "reward", "message"),
    [
        (None, {"score": 1.0}, r"samples\[0\]\.reward: .*--reward-key"),
        ("score", {"other": 1.0}, r"samples\[0\]\.reward\.score: got None, expected a number"),
        ("score", {"score": "high"}, r"samples\[0\]\.reward\.score: got high, expected a number"),
        ("score", {"score": True}, r"samples\[0\]\.reward\.score: got True, expected a number"),
        ("score", {"score": 1, "note": "x"}, None),
        ("score", 1.0, None),
        (None, 1.0, None),
    ],
)
def test_a_reward_that_is_no_number_is_refused_where_the_trainer_needs_one(connected, key, reward, message):
    client = connected(scalar_rewards=True, reward_key=key)
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    (sample,) = finish(lease.group.samples)
    sample.reward = reward
    if message is None:
        client.complete_group(lease.token, [sample])
    else:
        with pytest.raises(InvalidField, match=message):
            client.complete_group(lease.token, [sample])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"tokens": [3, 12, 1]}, None),
        ({"tokens": [3, 13, 1]}, r"tokens\[1\].*13.*\[0, 13\)"),
        ({"rollout_log_probs": None}, "rollout_log_probs"),
        ({"rollout_log_probs": None, "remove_sample": True}, None),
        ({"multimodal_train_inputs": {"pixel_values": np.zeros((1, 2), np.float32)}}, "reads text only"),
        ({"rollout_top_p_token_ids": [4, 5, 1], "rollout_top_p_token_offsets": [0, 2, 3]}, "got 3 ids, expected none"),
        (
            {
                "rollout_top_p_token_ids": [4, 5, 1],
                "rollout_top_p_token_offsets": [0, 2, 3],
                "remove_sample": True,
            },
            None,
        ),
        ({"rollout_top_p_token_ids": [], "rollout_top_p_token_offsets": [0, 0, 0]}, None),
    ],
)
def test_a_sample_that_the_model_of_the_run_cannot_read_is_refused(connected, change, message):
    client = connected(max_token_id=12, log_probs_required=True, text_only=True, nuclei="refused")
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    (sample,) = finish(lease.group.samples)
    sample.tokens, sample.response_length = [3, 4, 1], 2
    sample.rollout_log_probs, sample.loss_mask = [-0.5, -0.5], None
    for name, value in change.items():
        setattr(sample, name, value)
    if message is None:
        client.complete_group(lease.token, [sample])
    else:
        with pytest.raises(InvalidField, match=message):
            client.complete_group(lease.token, [sample])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None}, "token_ids: got None, expected the"),
        ({"rollout_top_p_token_offsets": [0, 3, 3]}, r"token_offsets\[1\]: got an empty nucleus"),
        ({"rollout_top_p_token_offsets": [0, 3, 3], "loss_mask": [1, 0]}, None),
        ({"rollout_top_p_token_ids": [4, 13, 1]}, r"token_ids\[1\]: got 13, expected ids in \[0, 13\)"),
        ({"rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None, "loss_mask": [0, 0]}, None),
        ({"rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None, "remove_sample": True}, None),
    ],
)
def test_a_sample_whose_nuclei_are_lacking_is_refused_where_the_trainer_needs_them(connected, change, message):
    client = connected(max_token_id=12, nuclei="required")
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    (sample,) = finish(lease.group.samples)
    sample.tokens, sample.response_length, sample.rollout_log_probs, sample.loss_mask = [3, 4, 1], 2, [-0.5, -0.5], None
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = [4, 5, 1], [0, 2, 3]
    for name, value in change.items():
        setattr(sample, name, value)
    if message is None:
        client.complete_group(lease.token, [sample])
    else:
        with pytest.raises(InvalidField, match=message):
            client.complete_group(lease.token, [sample])
