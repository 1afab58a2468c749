"""A stream that is cancelled between two attempts stays cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from slime.types.errors import Unavailable
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.types.rpc.retry import RetryInterceptor, TokenSource
from slime.v1 import buffer_pb2, buffer_pb2_grpc


class UnavailableOnce(buffer_pb2_grpc.BufferServiceServicer):
    calls = 0

    def LeaseGroups(self, request: Any, context: Any) -> Iterator[buffer_pb2.LeaseGroupsResponse]:
        self.calls += 1
        if self.calls == 1:
            raise Unavailable("starting")
        yield buffer_pb2.LeaseGroupsResponse()


def test_a_stream_that_is_cancelled_before_its_next_attempt_does_not_begin_again() -> None:
    servicer = (buffer_pb2_grpc.add_BufferServiceServicer_to_server, UnavailableOnce())
    with (
        RunningService(Server([servicer], RpcSettings(insecure=True), service_names=[])) as service,
        grpc.insecure_channel(service.address) as plain,
    ):
        streams: list[Any] = []

        def token() -> None:
            # Asked for before each attempt; before the first one there is no stream yet.
            for stream in streams:
                stream.cancel()

        channel = grpc.intercept_channel(plain, RetryInterceptor(30.0, TokenSource(token)))
        streams.append(buffer_pb2_grpc.BufferServiceStub(channel).LeaseGroups(buffer_pb2.LeaseGroupsRequest()))
        with pytest.raises(grpc.RpcError) as failed:
            list(streams[0])
    assert failed.value.code() is grpc.StatusCode.CANCELLED
