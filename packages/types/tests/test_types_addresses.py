"""Addresses that users give: valid ones, and none that would connect to another port than it names."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.types import errors
from slime.types.addresses import check_address, join_address, parse_address, split_address, split_url
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings, Server, connect

WRONG = [
    "127.0.0.1:99999", "127.0.0.1:65536", "127.0.0.1:0", "127.0.0.1:-1", "127.0.0.1", "127.0.0.1:", ":8080", "",
    "unix:",
    "::1:8080", "[::1]", "[::g]:1", "[1.2.3.4]:1", "host name:1", "host/path:1", "a@b:1", "dns:///host:1",
    "host:1,other:2",
    "host:٣", "host: 1", "host:1\n", "http://host:1", "-host:1", "host:" + "1" * 5000,
]  # fmt: skip
RIGHT = {
    "127.0.0.1:1": ("127.0.0.1", 1),
    "node-3.cluster.example:65535": ("node-3.cluster.example", 65535),
    "a_b:80": ("a_b", 80),
    "example.:80": ("example.", 80),
    "[::1]:8080": ("::1", 8080),
    "[fe80::1%eth0]:8080": ("fe80::1%eth0", 8080),
}


@pytest.mark.parametrize("address", WRONG)
def test_what_is_no_address_is_refused_before_anything_is_sent(address: str) -> None:
    with pytest.raises(errors.InvalidSetting, match="--address must be HOST:PORT with a port from 1 to 65535"):
        check_address(address, "--address")
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        parse_address(address)
    with pytest.raises(errors.InvalidSetting, match="must be HOST:PORT"):
        connect(address)
    with pytest.raises(errors.InvalidSetting, match="must be HOST:PORT"):
        BufferClient(address, settings=RpcSettings())


@pytest.mark.parametrize(("address", "parts"), RIGHT.items())
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert check_address(address) == parse_address(address) == address == join_address(*parts)
    assert split_url(address) == split_url(f"http://{address}/") == parts


@given(st.integers())
def test_a_port_is_the_one_that_was_written_or_refused(port: int) -> None:
    try:
        assert split_address(f"host:{port}") == ("host", port)
    except errors.InvalidSetting:
        assert not 0 < port < 65536


def test_an_ipv6_address_without_brackets_is_told_what_is_missing() -> None:
    with pytest.raises(errors.InvalidSetting, match="an IPv6 address in brackets"):
        split_address("::1:8080")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (RpcSettings(port=99999), "--port must be from 0 to 65535, got 99999"),
        (RpcSettings(port=-1), "--port must be from 0 to 65535, got -1"),
        (
            RpcSettings(host="127.0.0.1:80", insecure=True),
            "--host must be a name or an IP address, got '127.0.0.1:80'",
        ),
        (RpcSettings(host="", insecure=True), "--host must be"),
    ],
)
def test_a_server_listens_where_it_was_told_or_not_at_all(settings: RpcSettings, message: str) -> None:
    with pytest.raises(errors.InvalidSetting, match=message):
        Server([], settings, service_names=[]).start()


def test_a_socket_file_is_an_address() -> None:
    assert check_address("unix:/run/slime.sock") == "unix:/run/slime.sock"
    channel = connect("unix:/run/slime.sock")
    assert isinstance(channel, grpc.Channel)
    channel.close()
