"""A worker whose call for groups gets no answer in time gets the same groups from its next call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import slime.types.clients.buffer as client_module
from slime.buffer.buffer import Buffer
from slime.buffer.service import SERVICE_NAME, BufferService, RunningBuffer
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
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
