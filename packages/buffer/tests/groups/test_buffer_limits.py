"""Limits of calls: what one call may ask for, and how much many calls may take from the others."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from buffer_samples import complete
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slime.buffer import service as service_module
from slime.buffer.buffer import WAITING_CALLS
from slime.buffer.groups import leases as leases_module
from slime.buffer.service import INCOMING_STREAMS
from slime.types.clients import BufferClient
from slime.types.clients import buffer as client_module
from slime.types.errors import Busy, InvalidField, StaleWriter, WrongState
from slime.types.rpc import RpcSettings
from slime.v1 import buffer_pb2, buffer_pb2_grpc


@pytest.fixture
def client(connected) -> BufferClient:
    client = connected()
    client.add_prompts([f"p{i}" for i in range(8)])
    return client


@pytest.fixture
def stubs(client) -> Iterator[list[buffer_pb2_grpc.BufferServiceStub]]:
    """Streams of several connections, as of several clients."""
    with ExitStack() as stack:
        yield [
            buffer_pb2_grpc.BufferServiceStub(
                stack.enter_context(grpc.insecure_channel(client.address, [("grpc.use_local_subchannel_pool", 1)]))
            )
            for _ in range(8)
        ]


@pytest.mark.parametrize("ttl", [math.inf, math.nan, -1.0, 1e308, 8 * 86400.0])
def test_leases_are_finite(client, ttl):
    with pytest.raises(InvalidField, match="ttl_seconds"):
        client.lease_groups(1, ttl_seconds=ttl)
    (lease,) = client.lease_groups(1)
    with pytest.raises(InvalidField, match="ttl_seconds"):
        client.renew_leases([lease.token], ttl_seconds=ttl)


@pytest.mark.parametrize("wait", [math.inf, math.nan, -1.0, 601.0, 1e9])
def test_waits_are_bounded(client, stubs, wait):
    writer = client.writer.to_proto()
    calls = (
        lambda: stubs[0].GetPlan(buffer_pb2.GetPlanRequest(step=1, wait_seconds=wait), timeout=60),
        lambda: stubs[0].SealStep(
            buffer_pb2.SealStepRequest(writer=writer, num_groups=1, wait_seconds=wait), timeout=10
        ),
        lambda: next(
            stubs[0].LeaseGroups(
                buffer_pb2.LeaseGroupsRequest(writer=writer, max_groups=1, wait_seconds=wait), timeout=10
            )
        ),
    )
    for call in calls:
        with pytest.raises(grpc.RpcError, match="wait_seconds") as error:
            call()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_one_call_draws_a_part_of_the_dataset(connected, write_jsonl, monkeypatch):
    monkeypatch.setattr(leases_module, "MOST_GROUPS", 20)
    client = connected(prompt_data=write_jsonl([{"input": "q"}]))
    leased = client.lease_groups(2**31 - 1)
    assert len(leased) == 20
    with pytest.raises(InvalidField, match="tokens: got 21, expected at most 20"):
        client.renew_leases(["x"] * 21)


def test_names_and_reasons_are_short(client):
    text = "x" * 5000
    (lease,) = client.lease_groups(1)
    for field, call in {
        "worker_id": lambda: client.lease_groups(1, worker_id=text),
        "run_id": lambda: client.open_run(text),
        "reason": lambda: client.reject_group(lease.token, text),
        "key": lambda: client.add_prompts(["p"], key=text),
        "dataset": lambda: client.add_prompts(["p"], dataset=text),
    }.items():
        with pytest.raises(InvalidField, match=f"{field}: got 5000 characters"):
            call()
    with pytest.raises(InvalidField, match="reason"):
        client.drop_groups([0], text)


def test_a_longer_wait_is_several_calls(client, monkeypatch):
    monkeypatch.setattr(client_module, "WAIT_SLICE_SECONDS", 0.05)
    client.lease_groups(8)
    timer = threading.Timer(0.3, lambda: client.add_prompts(["late"]))
    timer.start()
    assert [lease.group.samples[0].prompt for lease in client.lease_groups(1, wait_seconds=20)] == ["late"]
    timer.join()


@pytest.mark.parametrize("step", [10**12 + 1, 2**63 - 1])
def test_a_stray_step_number_locks_nothing(client, step):
    complete(client, 3)
    with pytest.raises(InvalidField, match="last_committed_step"):
        client.open_run("run", last_committed_step=step)
    for stray in (step, 1, 10**12):
        with pytest.raises((InvalidField, WrongState)):
            client.seal_step(stray, 1)
    assert client.stats().next_step == 0
    assert len(client.seal_step(0, 1)) == 1
    assert client.open_run("run").incarnation == 2


def test_a_stray_incarnation_locks_nothing(client):
    with BufferClient(client.address) as stray:
        stray.writer = type(client.writer)("run", 2**60)
        with pytest.raises(StaleWriter):
            stray.lease_groups(1)
    assert len(client.lease_groups(1)) == 1


def test_600_waiting_calls_leave_the_others_answered(client, stubs):
    client.lease_groups(8)
    writer = client.writer.to_proto()
    calls = []
    for number in range(300):
        stub = stubs[number % len(stubs)]
        calls.append(stub.GetPlan.future(buffer_pb2.GetPlanRequest(step=10**6, wait_seconds=60), timeout=90))
        calls.append(
            stub.LeaseGroups(buffer_pb2.LeaseGroupsRequest(writer=writer, max_groups=1, wait_seconds=60), timeout=90)
        )
    with grpc.insecure_channel(client.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        deadline = time.monotonic() + 60
        refused = 0
        # Calls beyond the limit are refused at once.
        while refused < 600 - WAITING_CALLS and time.monotonic() < deadline:
            refused = sum(call.done() for call in calls)
            assert client.stats().groups["leased"] == 8
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=20).status == 1
        codes = [call.code() for call in calls if call.done()]
        assert len(codes) == 600 - WAITING_CALLS and set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all("call again later" in str(call.details()) for call in calls if call.done())
        # Waiting calls still get work.
        client.add_prompts(["one"])
        assert client.stats().groups["leased"] in (8, 9)
    for call in calls:
        call.cancel()
    assert client.renew_leases(["none"]) == ["none"]


def test_a_write_wakes_no_more_calls_than_it_has_something_for(client, stubs):
    client.lease_groups(8)
    writer = client.writer.to_proto()
    request = buffer_pb2.LeaseGroupsRequest(writer=writer, max_groups=1, wait_seconds=60)
    calls = [stubs[number % len(stubs)].LeaseGroups(request, timeout=90) for number in range(200)]
    answered: list[int] = []

    def wait_for(call) -> None:
        for response in call:
            answered.append(response.lease.group_index)

    threads = [threading.Thread(target=wait_for, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    added = client.add_prompts([f"more {i}" for i in range(200)])
    for thread in threads:
        thread.join(60)
    assert sorted(answered) == list(range(added.first_group_index, added.first_group_index + 200))


def test_streams_that_stay_open_leave_the_others_answered(client, stubs):
    end = threading.Event()

    def slow():
        yield buffer_pb2.AddPromptsRequest(key="k")
        end.wait(60)

    calls = [
        stubs[number % len(stubs)].AddPrompts.future(slow(), timeout=60) for number in range(INCOMING_STREAMS + 20)
    ]
    try:
        deadline = time.monotonic() + 30
        while sum(call.done() for call in calls) < 20 and time.monotonic() < deadline:
            assert client.stats().groups["ready"] == 8
        codes = {call.code() for call in calls if call.done()}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        with BufferClient(client.address, settings=RpcSettings(retry_seconds=0)) as other:
            with pytest.raises(Busy, match="streams are open already"):
                other.add_prompts(["p"], key="other")
    finally:
        end.set()
    for call in calls:
        call.exception(timeout=60)
    client.add_prompts(["p"], key="later")


def test_a_stream_that_stays_open_too_long_is_ended(serving, monkeypatch):
    monkeypatch.setattr(service_module, "STREAM_SECONDS", 0.2)
    end = threading.Event()

    def slow():
        yield buffer_pb2.AddPromptsRequest(key="k")
        end.wait(60)

    with grpc.insecure_channel(serving().address) as channel:
        try:
            with pytest.raises(grpc.RpcError) as error:
                buffer_pb2_grpc.BufferServiceStub(channel).AddPrompts(slow(), timeout=60)
            assert error.value.code() is grpc.StatusCode.CANCELLED
        finally:
            end.set()


def test_a_call_of_many_prompts_is_bounded(connected):
    client = connected(max_prompts_mb=1)
    with pytest.raises(InvalidField, match="--max-prompts-mb"):
        client.add_prompts(["x" * 300_000] * 4)
    with pytest.raises(InvalidField, match="--max-prompts-mb"):
        client.add_prompts([""] * 4096)
    assert client.stats().next_group_index == 0
    assert client.add_prompts(["x" * 300_000] * 3).added == 3


def test_a_key_is_of_the_prompts_that_it_was_first_used_for(client):
    client.add_prompts(["a", "b"], key="k")
    assert client.add_prompts(["a", "b"], key="k").duplicate
    for other in (["a"], ["a", "c"], ["ab"], [{"prompt": "a", "label": "1"}, "b"]):
        with pytest.raises(InvalidField, match="other prompts were added under this one"):
            client.add_prompts(other, key="k")
    with pytest.raises(InvalidField, match="other prompts"):
        client.add_prompts(["a", "b"], key="k", dataset="held-out")
    assert client.stats().next_group_index == 10


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (buffer_pb2.Prompt(messages_json=DEEP), ""),
        (buffer_pb2.Prompt(text="p", metadata_json=DEEP), ""),
        (buffer_pb2.Prompt(text="p", metadata_json='{"a": ' + "9" * 5000 + "}"), ""),
        (buffer_pb2.Prompt(text="p", metadata_json='{"a": [0, NaN]}'), r"\.metadata_json\.a\[1\]: got nan"),
        (buffer_pb2.Prompt(text="p", metadata_json='{"a": 1e999}'), r"\.metadata_json\.a: got inf"),
        (buffer_pb2.Prompt(messages_json='[{"role": -Infinity}]'), r"\.messages_json\[0\]\.role: got -inf"),
    ],
    ids=["messages", "metadata", "digits", "NaN", "overflow", "Infinity"],
)
def test_json_that_cannot_be_read_is_named(client, stubs, prompt, field):
    with pytest.raises(grpc.RpcError, match=rf"prompts\[0\]{field}") as error:
        stubs[0].AddPrompts(iter([buffer_pb2.AddPromptsRequest(prompts=[prompt])]), timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_plan_that_cannot_be_read_is_named(client, stubs):
    complete(client, 1)
    client.seal_step(0, 1)
    request = buffer_pb2.StorePlanRequest(writer=client.writer.to_proto(), plan_json=DEEP)
    with pytest.raises(grpc.RpcError, match="plan_json") as error:
        stubs[0].StorePlan(request, timeout=60)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
