"""A client is served again soon after its server is back, however long the server was gone."""

from __future__ import annotations

import time

import pytest

from slime.buffer.buffer import Buffer
from slime.buffer.service import serve_buffer
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
from slime.types.errors import Unavailable
from slime.types.rpc import RpcSettings

# gRPC's own pauses would have grown to four seconds by then.
OUTAGE_SECONDS = 5.5


def test_a_client_is_served_again_within_two_seconds(tmp_path):
    settings = BufferSettings(buffer_dir=str(tmp_path / "state"))
    with serve_buffer(Buffer(settings), RpcSettings()) as service:
        address = service.address
        client = BufferClient(address, settings=RpcSettings(retry_seconds=0.2))
        client.stats()
    with client:
        gone = time.monotonic()
        while time.monotonic() - gone < OUTAGE_SECONDS:
            with pytest.raises(Unavailable):
                client.stats()
        with serve_buffer(Buffer(settings), RpcSettings(port=int(address.rpartition(":")[2]))):
            back = time.monotonic()
            while True:
                try:
                    client.stats()
                    break
                except Unavailable:
                    assert time.monotonic() - back < 2
            assert time.monotonic() - back < 2
