"""Calls after a part of a run was started again: leases of a lost answer, groups of a dead worker, steps to replay."""

from __future__ import annotations

import pytest
from buffer_samples import complete, finish

from slime.types.errors import InvalidField, LeaseLost, WrongState
from slime.v1 import buffer_pb2, buffer_pb2_grpc

# With every store.
pytestmark = pytest.mark.stores("sqlite", "postgresql", "postgresql and s3")


@pytest.fixture
def client(connected):
    client = connected(n_samples_per_prompt=2)
    client.add_prompts(["a", "b", "c", "d"])
    return client


def lease(client, request_id: str, groups: int = 2) -> list[tuple[int, str]]:
    stub = buffer_pb2_grpc.BufferServiceStub(client._channel)
    request = buffer_pb2.LeaseGroupsRequest(
        writer=client.writer.to_proto(), max_groups=groups, request_id=request_id, worker_id="w"
    )
    return [(m.lease.group_index, m.lease.token) for m in stub.LeaseGroups(request)]


def test_a_repeated_call_gets_the_groups_of_the_answer_that_was_lost(client):
    first = lease(client, "one")
    assert [index for index, _ in first] == [0, 1]
    assert lease(client, "one") == first
    # Another name is another call, also one that begins with the same letters.
    assert [index for index, _ in lease(client, "on", 1)] == [2]
    client.reject_group(first[0][1], "tested")
    assert lease(client, "one") == first[1:]


@pytest.mark.parametrize("request_id", ["a.b", "x" * 65, "é"])
def test_a_name_that_could_be_a_token_is_refused(client, request_id):
    with pytest.raises(InvalidField, match="request_id"):
        lease(client, request_id)


def test_leases_of_a_dead_worker_end_and_those_of_others_stay(client):
    (dead,) = client.lease_groups(1, worker_id="dead")
    (living,) = client.lease_groups(1, worker_id="living")
    assert client.requeue_groups("dead") == 1
    with pytest.raises(LeaseLost):
        client.complete_group(dead.token, finish(dead.group.samples))
    assert client.complete_group(living.token, finish(living.group.samples)) is False
    assert client.lease_groups(1)[0].group.group_index == dead.group.group_index


def test_what_no_step_has_taken_is_given_again_as_it_was_drawn(client):
    complete(client, 1)
    client.seal_step(0, 1)
    (done,) = client.lease_groups(1, worker_id="dead")
    client.complete_group(done.token, finish(done.group.samples))
    (refused,) = client.lease_groups(1, worker_id="dead")
    client.reject_group(refused.token, "no signal")
    (dropped,) = client.lease_groups(1, worker_id="dead")
    client.return_group(dropped.token)
    client.drop_groups([dropped.group.group_index], "by hand")
    assert client.requeue_groups("dead", unsealed=True) == 2
    assert client.stats().groups["sealed"] == 1 and client.stats().rejected == {"by hand": 1}
    again = client.lease_groups(4)
    assert [lease.group.group_index for lease in again] == [1, 2]
    assert [sample.response for sample in again[0].group.samples] == ["", ""]
    assert client.stats().payload_bytes == sum(info.payload_bytes for info in client.list_groups(states=["sealed"]))
    with pytest.raises(LeaseLost):
        client.complete_group(done.token, finish(done.group.samples))


def test_a_complete_group_that_an_operator_rejected_is_not_given_again(client):
    (poisonous,) = client.lease_groups(1, worker_id="dead")
    client.complete_group(poisonous.token, finish(poisonous.group.samples))
    client.drop_groups([poisonous.group.group_index], "by hand")
    assert client.requeue_groups("dead", unsealed=True) == 0
    assert client.stats().rejected == {"by hand": 1}


def test_a_group_that_is_rejected_steps_after_later_ones_were_trained_on_is_counted(client):
    client.add_prompts(["e"])
    (straggler,) = client.lease_groups(1)
    for step in range(2):
        complete(client, 1)
        assert client.seal_step(step, 1).rejected == {}
    client.reject_group(straggler.token, "dull")
    for step, rejected in ((2, {"dull": 1}), (3, {})):
        complete(client, 1)
        assert client.seal_step(step, 1).rejected == rejected


def test_steps_are_trained_again_after_a_rewind_that_commits_nothing(client):
    sealed = []
    for step in range(3):
        complete(client, 1)
        sealed.append(client.seal_step(step, 1))
        client.store_plan(step, {"step": step})
        client.acknowledge_step(step)
    (running,) = client.lease_groups(1)
    client.rewind_steps(0)
    assert client.stats().next_step == 1 and client.stats().groups["committed"] == 0
    for step in (1, 2):
        assert client.seal_step(step, 1) == sealed[step]
        assert client.get_plan(step) == {"step": step}
        assert len(list(client.read_step(step, [0]))) == 1
        client.acknowledge_step(step)
    # Generation continued meanwhile.
    assert client.complete_group(running.token, finish(running.group.samples)) is False
    client.rewind_steps(-1)
    client.acknowledge_step(0)
    with pytest.raises(WrongState, match="step 1 is not acknowledged; the last one that is acknowledged is 0"):
        client.rewind_steps(1)
