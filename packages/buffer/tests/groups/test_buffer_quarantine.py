"""Groups that an operator takes out of a run, sealed ones included, and the run that continues without them."""

from __future__ import annotations

import threading

import pytest
from buffer_samples import complete, finish

from slime.buffer.groups.run_lock import WriterId
from slime.buffer.waits import Caller
from slime.types.clients import BufferClient
from slime.types.errors import InvalidField, LeaseLost, NotFound, WrongState

# With every store.
pytestmark = pytest.mark.stores


@pytest.fixture
def client(connected, write_jsonl) -> BufferClient:
    return connected(prompt_data=write_jsonl([{"input": f"q{i}"} for i in range(5)]))


def groups_of(client: BufferClient, step: int, count: int) -> list[int]:
    return [summary.group_index for summary in client.seal_step(step, count)]


@pytest.mark.parametrize("quarantine", [True, False])
def test_a_sealed_group_leaves_and_its_step_is_planned_again(client, quarantine):
    complete(client, 6)
    assert groups_of(client, 0, 2) == [0, 1]
    client.store_plan(0, {"first": 1})
    assert groups_of(client, 1, 2) == [2, 3]
    client.store_plan(1, {"first": 1})
    assert client.drop_groups([1], "poison", quarantine=quarantine) == [0, 1]
    with pytest.raises(NotFound):
        client.get_plan(0)
    with pytest.raises(NotFound, match="step 0 is not sealed"):
        client.acknowledge_step(0)

    assert groups_of(client, 0, 2) == [0, 2]
    assert client.store_plan(0, {"second": 1}) == {"second": 1}
    assert [sample.group_index for sample in client.read_step(0, [0, 1])] == [0, 2]
    client.acknowledge_step(0)
    assert groups_of(client, 1, 2) == [3, 4]
    (gone,) = client.list_groups(group_indexes=[1])
    assert (gone.state, gone.reason) == ("quarantined" if quarantine else "rejected", "poison")
    (stored,) = client.read_groups(group_indexes=[1])
    assert stored.group.samples[0].response == ("345" if quarantine else "")
    assert (gone.payload_bytes > 0) is quarantine


def test_a_step_that_waits_for_several_groups_learns_that_the_one_before_it_was_unsealed(serving, write_jsonl):
    served = serving(prompt_data=write_jsonl([{"input": f"q{i}"} for i in range(5)]))
    waiting, failed, caller = threading.Event(), threading.Event(), Caller()

    class Entered(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    caller.wake_event = Entered()

    def seal() -> None:
        with pytest.raises(WrongState, match="step 1 cannot be sealed before step 0"):
            served.buffer.seal(writer, 1, 5, wait=60.0, caller=caller)
        failed.set()

    with BufferClient(served.address) as client:
        opened = client.open_run("run")
        writer = WriterId(opened.run_id, opened.incarnation)
        complete(client, 4)
        client.seal_step(0, 3)
        thread = threading.Thread(target=seal)
        thread.start()
        assert waiting.wait(20.0)
        client.drop_groups([0])
        assert failed.wait(10.0)
        thread.join()


def test_a_crash_behind_the_drop_seals_what_is_left(client):
    complete(client, 3)
    client.seal_step(0, 2)
    client.drop_groups([0])
    client.open_run("run")
    assert groups_of(client, 0, 2) == [1, 2]


def test_the_step_that_was_sealed_last_is_answered_again_without_its_groups(serving, write_jsonl, monkeypatch):
    served = serving(prompt_data=write_jsonl([{"input": f"q{i}"} for i in range(5)]))
    reads: list[int] = []
    groups = served.buffer.store.completed_groups

    def counted(**options):
        reads.append(1)
        return groups(**options)

    monkeypatch.setattr(served.buffer.store, "completed_groups", counted)
    with BufferClient(served.address) as client:
        client.open_run("run")
        complete(client, 3)
        sealed = client.seal_step(0, 2, metrics={"a": 1.0})
        reads.clear()
        # The launcher seals, and then the trainer asks.
        again = client.seal_step(0, 2)
        assert (list(again), again.metrics, reads) == (list(sealed), {"a": 1.0}, [])
        # Later calls look for damage.
        assert client.seal_step(0, 2) == sealed and reads
        client.drop_groups([0])
        assert groups_of(client, 0, 2) == groups_of(client, 0, 2) == [1, 2]


def test_a_group_in_any_state_before_training_can_be_dropped(client):
    complete(client, 1)
    (lease,) = client.lease_groups(1)
    client.add_prompts(["waiting"])
    assert client.drop_groups([0, 1, 2], "not wanted", quarantine=True) == []
    with pytest.raises(LeaseLost):
        client.complete_group(lease.token, finish(lease.group.samples))
    assert client.stats().groups["quarantined"] == 3
    # A group that was set aside can be given up, more than once.
    for _ in range(2):
        client.drop_groups([0])
    assert client.stats().rejected == {"dropped": 1}
    assert [group.state for group in client.list_groups(states=["quarantined", "rejected"])] == [
        "rejected", "quarantined", "quarantined",
    ]  # fmt: skip
    assert [lease.group.group_index for lease in client.lease_groups(1)] == [3]


def test_what_cannot_be_dropped_is_named_and_nothing_changes(client):
    complete(client, 3)
    client.seal_step(0, 1)
    client.acknowledge_step(0)
    with pytest.raises(WrongState, match="group 0 is acknowledged: step 0 was trained with it"):
        client.drop_groups([1, 0])
    with pytest.raises(NotFound, match="no group 99"):
        client.drop_groups([1, 99])
    with pytest.raises(InvalidField, match="at least one group"):
        client.drop_groups([])
    assert client.stats().groups["completed"] == 2


def test_groups_are_listed_without_their_samples(client):
    complete(client, 2)
    client.lease_groups(1, worker_id="me")
    listed = list(client.list_groups())
    assert [(g.group_index, g.state, g.num_samples, g.attempt) for g in listed] == [
        (0, "completed", 1, 1), (1, "completed", 1, 1), (2, "leased", 0, 1),
    ]  # fmt: skip
    assert listed[0].payload_bytes > 0 and listed[2].worker_id == "me"
    assert [g.group_index for g in client.list_groups(states=["completed"], after_group_index=0)] == [1]
    with pytest.raises(NotFound):
        list(client.list_groups(group_indexes=[7]))


def test_samples_of_rejected_groups_are_deleted(client):
    (lease,) = client.lease_groups(1)
    client.return_group(lease.token, finish(lease.group.samples))
    (lease,) = client.lease_groups(1)
    assert client.stats().payload_bytes > 0
    client.reject_group(lease.token, "no")
    client.reject_group(lease.token, "no")
    assert client.stats().payload_bytes == 0
