"""Calls whose answer does not come in time, or not as a whole, and the calls that follow them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
