"""Calls whose answer does not come in time, or not as a whole, and the calls that follow them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from buffer_samples import complete

import slime.buffer.groups.steps as steps_module
import slime.types.clients.buffer as client_module
from slime.buffer.buffer import Buffer
from slime.buffer.service import SERVICE_NAME, BufferService, RunningBuffer
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
from slime.types.errors import DeadlineExceeded
from slime.types.rpc import RpcSettings, Server
from slime.v1 import buffer_pb2, buffer_pb2_grpc


class LateOnce(BufferService):
    """Leases groups for the first call, and keeps the answer until its client has given up."""

    calls = 0

    def LeaseGroups(
        self, request: buffer_pb2.LeaseGroupsRequest, context: Any
    ) -> Iterator[buffer_pb2.LeaseGroupsResponse]:
        answers = list(super().LeaseGroups(request, context))
        self.calls += 1
        if self.calls == 1:
            ended = threading.Event()
            if context.add_callback(ended.set):
                ended.wait(30.0)
        yield from answers


def test_groups_of_an_answer_that_came_too_late_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "WAIT_SLICE_SECONDS", 0.01)
    monkeypatch.setattr(client_module, "SLACK_SECONDS", 1.0)
    buffer = Buffer(BufferSettings(n_samples_per_prompt=1))
    service = LateOnce(buffer)
    server = Server(
        [(buffer_pb2_grpc.add_BufferServiceServicer_to_server, service)], RpcSettings(), service_names=[SERVICE_NAME]
    )
    with RunningBuffer(server, buffer) as running, BufferClient(running.address) as client:
        client.open_run("r")
        client.add_prompts(["a"])
        (leased,) = client.lease_groups(1, wait_seconds=5.0)
        assert service.calls > 1
        client.return_group(leased.token)


class SlowStep(BufferService):
    """Sends `most` messages of a step in a call, and then nothing until its client has given up."""

    calls = 0
    most = 1

    def ReadStep(self, request: buffer_pb2.ReadStepRequest, context: Any) -> Iterator[bytes]:
        self.calls += 1
        ended = threading.Event()
        waits = context.add_callback(ended.set)
        for number, message in enumerate(super().ReadStep(request, context)):
            if number == self.most and waits:
                ended.wait(30.0)
            yield message


def test_a_step_that_takes_longer_than_a_call_is_read_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "READ_BYTES", 1)
    buffer = Buffer(BufferSettings(n_samples_per_prompt=1))
    service = SlowStep(buffer)
    server = Server(
        [(buffer_pb2_grpc.add_BufferServiceServicer_to_server, service)], RpcSettings(), service_names=[SERVICE_NAME]
    )
    short = RpcSettings(call_timeout_seconds=1.0)
    with (
        RunningBuffer(server, buffer) as running,
        BufferClient(running.address) as client,
        BufferClient(running.address, settings=short) as reader,
    ):
        client.open_run("r")
        client.add_prompts(["a", "b", "c"])
        complete(client, 3)
        client.seal_step(0, 3)
        assert [sample.index for sample in reader.read_step(0, [2, 0, 1])] == [2, 0, 1]
        assert service.calls == 3
        # One that brings nothing ends it.
        service.most = 0
        with pytest.raises(DeadlineExceeded):
            list(reader.read_step(0, [2, 0, 1]))
        assert service.calls == 4


class SlowReads(BufferService):
    """Sends `most` groups in a call, and then nothing until its client has given up; one that brings less sends its
    message again and again for `lasting` seconds first."""

    calls = 0
    most = 1
    lasting = 0.0
    sent = 0

    def ReadGroups(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._then_nothing(super().ReadGroups(request, context), context)

    def ListGroups(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._then_nothing(super().ListGroups(request, context), context)

    def ReadPlace(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._for_long(super().ReadPlace(request, context), context)

    def ReadEvaluationSet(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._for_long(super().ReadEvaluationSet(request, context), context)

    def _then_nothing(self, messages: Iterator[Any], context: Any) -> Iterator[Any]:
        self.calls += 1
        ended = threading.Event()
        waits = context.add_callback(ended.set)
        for number, message in enumerate(messages):
            if number == self.most and waits:
                ended.wait(30.0)
            yield message

    def _for_long(self, messages: Iterator[Any], context: Any) -> Iterator[Any]:
        self.sent = 0
        (message,) = messages
        started = time.monotonic()
        while not self.sent or time.monotonic() < started + self.lasting:
            self.sent += 1
            yield message
            time.sleep(0.01)
        yield from self._then_nothing(iter([message]), context)


@pytest.fixture
def slow_reads() -> Iterator[tuple[SlowReads, BufferClient]]:
    buffer = Buffer(BufferSettings(n_samples_per_prompt=1))
    service = SlowReads(buffer)
    server = Server(
        [(buffer_pb2_grpc.add_BufferServiceServicer_to_server, service)], RpcSettings(), service_names=[SERVICE_NAME]
    )
    with (
        RunningBuffer(server, buffer) as running,
        BufferClient(running.address, settings=RpcSettings(call_timeout_seconds=1.0)) as client,
    ):
        client.open_run("r")
        client.add_prompts(["a", "b", "c", "d"], key="k")
        client.add_prompts(["held out"], dataset="held", key="h")
        yield service, client


@pytest.mark.parametrize("name", ["read_groups", "list_groups"])
def test_groups_that_take_longer_than_a_call_are_read_in_several(
    slow_reads: tuple[SlowReads, BufferClient], name: str
) -> None:
    service, client = slow_reads
    read: Callable[..., Iterator[Any]] = getattr(client, name)

    def indexes(**values: Any) -> list[int]:
        found = read(**values)
        return [each.group_index if name == "list_groups" else each.group.group_index for each in found]

    assert indexes(after_group_index=0, limit=2) == [1, 2]
    assert service.calls == 2
    assert indexes(group_indexes=[3, 0]) == [0, 3]
    service.calls, service.most = 0, 0
    with pytest.raises(DeadlineExceeded):
        indexes()
    assert service.calls == 1


@pytest.mark.parametrize("name, value", [("read_place", -1), ("read_evaluation_set", "held")])
def test_the_deadline_of_a_long_answer_is_one_between_its_messages(
    slow_reads: tuple[SlowReads, BufferClient], name: str, value: Any
) -> None:
    service, client = slow_reads
    service.lasting = 1.5
    whole = getattr(client, name)(value)
    assert service.sent > 1 and len(whole) >= service.sent
    service.most = 0
    with pytest.raises(DeadlineExceeded, match="no answer within 1 s"):
        getattr(client, name)(value)
