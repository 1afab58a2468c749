"""Several groups completed in one call, over real gRPC: all of them or none."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest
from buffer_samples import finish

from slime.buffer.groups import handed_in
from slime.buffer.groups.leases import Leases
from slime.types.clients import handing_in
from slime.types.codec import encode_sample
from slime.types.errors import InvalidField, LeaseLost, StaleWriter
from slime.types.wire.encoded import encode_list
from slime.v1 import buffer_pb2, buffer_pb2_grpc

pytestmark = pytest.mark.stores


@pytest.fixture
def client(connected):
    client = connected(n_samples_per_prompt=2)
    client.add_prompts(["a", "b", "c", "d"])
    return client


def finished(leases):
    return [(lease.token, finish(lease.group.samples)) for lease in leases]


def test_groups_are_completed_in_one_call_and_a_second_time_without_effect(client):
    groups = finished(client.lease_groups(3))
    assert client.complete_groups(groups[:1]) == [False]
    assert client.complete_groups(groups) == [True, False, False]
    assert client.complete_groups([]) == []
    client.seal_step(0, 3)
    assert client.complete_groups(groups) == [True, True, True]
    assert [sample.index for sample in client.read_step(0, range(6))] == [0, 1, 2, 3, 4, 5]


def test_bytes_of_which_not_every_sample_was_checked_are_refused(client, monkeypatch: pytest.MonkeyPatch):
    """The two readers of one message have to agree, however the one of protobuf is implemented."""
    groups = finished(client.lease_groups(1))
    places_of = handed_in.places_of
    monkeypatch.setattr(handed_in, "places_of", lambda *args: places_of(*args) * (1 + (args[1] == "samples")))
    with pytest.raises(InvalidField, match="2 samples in 4 places"):
        client.complete_groups(groups)


def test_a_token_that_occurs_twice_completes_its_group_once(client):
    (group,) = finished(client.lease_groups(1))
    assert client.complete_groups([group, group]) == [False, True]
    assert client.stats().groups["completed"] == 1


@pytest.mark.stores("sqlite")
@pytest.mark.parametrize("wrong", ["sample", "index", "lease"])
def test_one_wrong_group_leaves_all_of_them_as_they_were(connected, tmp_path: Path, wrong: str):
    client = connected(n_samples_per_prompt=2, buffer_dir=str(tmp_path / "buffer"))
    client.add_prompts(["a", "b", "c"])
    groups = finished(client.lease_groups(3))
    if wrong == "sample":
        groups[1][1][0].reward = float("nan")
        error, field = InvalidField, "groups[1].samples[0].reward"
    elif wrong == "index":
        groups[1][1][1].index = 77
        error, field = InvalidField, "groups[1].samples[1].index"
    else:
        client.reject_group(groups[2][0], "no")
        error, field = LeaseLost, "lease_token"
    with pytest.raises(error) as raised:
        client.complete_groups(groups)
    assert raised.value.field == field
    assert client.stats().groups["completed"] == 0
    assert not [path for path in tmp_path.glob("buffer/payloads/*/*") if path.is_file()]


def test_a_writer_of_an_earlier_incarnation_is_refused(client):
    groups = finished(client.lease_groups(2))
    earlier, _ = client.writer, client.open_run("run")
    client.writer = earlier
    with pytest.raises(StaleWriter):
        client.complete_groups(groups)


@pytest.mark.stores("sqlite")
def test_more_than_fits_a_call_takes_several_whose_errors_count_all_groups(client, monkeypatch):
    groups = finished(client.lease_groups(4))
    one = sum(map(len, handing_in.messages_of(buffer_pb2.CompleteGroupRequest(lease_token=groups[0][0]), groups[0][1])))
    monkeypatch.setattr(handing_in, "CALL_BYTES", int(2.5 * one))
    # The third does not fit a call at all.
    for sample in groups[2][1]:
        sample.response = "x" * 3 * one
    counts = [(call.first, call.count, bool(call.parts)) for call in handing_in.calls_of(groups, client._writer())]
    assert counts == [(0, 2, True), (2, 1, False), (3, 1, True)]
    for position in (2, 3):
        index, groups[position][1][0].index = groups[position][1][0].index, 77
        with pytest.raises(InvalidField) as raised:
            client.complete_groups(groups)
        assert raised.value.field == f"groups[{position}].samples[0].index"
        groups[position][1][0].index = index
    assert client.complete_groups(groups) == [True, True, True, False]


@pytest.mark.stores("sqlite")
@pytest.mark.parametrize("durability", ["process", "power"])
def test_groups_that_survive_a_power_cut_are_on_the_disk_before_the_state_names_them(
    connected, tmp_path: Path, monkeypatch, durability: str
):
    client = connected(n_samples_per_prompt=2, buffer_dir=str(tmp_path / "buffer"), buffer_durability=durability)
    client.add_prompts(["a", "b", "c"])
    groups = finished(client.lease_groups(3))
    synced: list[str] = []
    fsync, end_leased = os.fsync, Leases._end_leased

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def end(leases: Leases, *arguments):
        synced.append("state")
        return end_leased(leases, *arguments)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Leases, "_end_leased", end)
    client.complete_groups(groups)
    files = sorted(str(path) for path in tmp_path.glob("buffer/payloads/*/*"))
    shard, directory = str(Path(files[0]).parent), str(tmp_path / "buffer" / "payloads")
    before = [path for path in synced[: synced.index("state")] if path.startswith(directory)]
    assert sorted(before) == (sorted([*files, shard, directory]) if durability == "power" else [])


@pytest.mark.stores("sqlite")
def test_parts_that_make_no_whole_groups_are_refused(client, monkeypatch):
    groups = finished(client.lease_groups(3))
    (call,) = handing_in.calls_of(groups, client._writer())
    (message,) = (buffer_pb2.CompleteGroupsRequest.FromString(each) for each in call.messages())
    parts = list(message.parts)
    with grpc.insecure_channel(client.address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)

        def refusal(*messages):
            with pytest.raises(grpc.RpcError) as raised:
                stub.CompleteGroups(iter(messages))
            return raised.value.details()

        assert "nothing was stored" in refusal(
            buffer_pb2.CompleteGroupsRequest(parts=parts[:2]), buffer_pb2.CompleteGroupsRequest(parts=[open_(parts[2])])
        )
        assert "one group or more" in refusal(buffer_pb2.CompleteGroupsRequest())
        monkeypatch.setattr(handed_in, "MOST_GROUPS", 2)
        assert "at most 2 in a call" in refusal(message)
        monkeypatch.setattr(handed_in, "MOST_BYTES", parts[0].ByteSize() + 1)
        assert "or a single group" in refusal(message)
    assert client.stats().groups["completed"] == 0
    monkeypatch.undo()
    assert client.complete_groups(groups) == [False] * 3


@pytest.mark.stores("sqlite")
@pytest.mark.parametrize("together", [True, False])
def test_samples_are_stored_as_the_bytes_that_arrived(connected, tmp_path: Path, together: bool):
    client = connected(n_samples_per_prompt=2, buffer_dir=str(tmp_path / "buffer"))
    client.add_prompts(["a"])
    ((token, samples),) = finished(client.lease_groups(1))
    # A field that this version does not know, before the others: protobuf would write it after them.
    newer = b"\xa2\x1f\x03new"
    sent = [newer + encode_sample(sample) for sample in samples]
    group = buffer_pb2.CompleteGroupRequest(writer=client._writer(), lease_token=token, commit=True).SerializeToString()
    group += encode_list(buffer_pb2.CompleteGroupRequest, "samples", sent)
    name, message = "CompleteGroup", group
    if together:
        name, message = "CompleteGroups", encode_list(buffer_pb2.CompleteGroupsRequest, "parts", [group])
    with grpc.insecure_channel(client.address) as channel:
        channel.stream_unary(f"/slime.v1.BufferService/{name}")(iter([message]))
    (file,) = (path for path in tmp_path.glob("buffer/payloads/*/*") if path.is_file())
    assert file.read_bytes() == b"".join(sent)
    client.seal_step(0, 1)
    assert list(client.read_step(0, [0, 1])) == samples


@pytest.mark.stores("sqlite")
def test_a_failed_sample_is_stored_without_its_useless_reward_beside_one_that_is_stored_as_it_arrived(connected):
    client = connected(n_samples_per_prompt=2)
    client.add_prompts(["a"])
    ((token, samples),) = finished(client.lease_groups(1))
    samples[0].status, samples[0].reward = samples[0].Status.FAILED, float("nan")
    client.complete_groups([(token, samples)])
    client.seal_step(0, 1)
    assert [(each.reward, each.remove_sample) for each in client.read_step(0, [0, 1])] == [(None, True), (1.0, False)]


@pytest.mark.stores("sqlite")
@pytest.mark.parametrize("name", ["CompleteGroups", "CompleteGroup", "ReturnGroup"])
@pytest.mark.parametrize("broken", [b"\x1a\x05abc", b"\x1a\x02\x5a\x09", b"\x0b"], ids=["cut", "sample", "group"])
def test_bytes_that_cannot_be_read_are_the_fault_of_the_caller(client, name: str, broken: bytes):
    message = broken
    if name == "CompleteGroups":
        message = encode_list(buffer_pb2.CompleteGroupsRequest, "parts", [broken])
    with grpc.insecure_channel(client.address) as channel:
        for data in (message, b"\x0a\x7f"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.stream_unary(f"/slime.v1.BufferService/{name}")(iter([data]))
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "request: got bytes that cannot be read" in raised.value.details()


@pytest.mark.stores("sqlite")
def test_a_wrong_sample_of_a_later_call_is_found_before_the_first(client, monkeypatch):
    groups = finished(client.lease_groups(4))
    monkeypatch.setattr(handing_in, "CALL_BYTES", 1)
    groups[3][1][1].reward = float("nan")
    with pytest.raises(InvalidField) as raised:
        client.complete_groups(groups)
    assert raised.value.field == "groups[3].samples[1].reward"
    assert client.stats().groups["completed"] == 0


@pytest.mark.stores("sqlite")
def test_a_value_that_cannot_be_encoded_is_named_with_its_group_and_sample(client):
    groups = finished(client.lease_groups(3))
    groups[1][1][1].metadata = {"x": object()}
    with pytest.raises(InvalidField) as raised:
        client.complete_groups(groups)
    assert raised.value.field == "groups[1].samples[1].metadata.x"


def open_(part):
    """Returns the part without its commit."""
    copy = buffer_pb2.CompleteGroupRequest()
    copy.CopyFrom(part)
    copy.commit = False
    return copy
