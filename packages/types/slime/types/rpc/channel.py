"""Channels to services, with deadlines, retries, TLS, tokens and SlimeErrors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from slime.types.addresses import check_address
from slime.types.rpc.auth import TokenInterceptor, channel_credentials, token_source
from slime.types.rpc.details import with_details
from slime.types.rpc.raising import RaisingInterceptor
from slime.types.rpc.retry import RetryInterceptor
from slime.types.rpc.settings import RpcSettings

KEEPALIVE_MS = 30_000
# First and longest pause before a channel reconnects.
RECONNECT_MS = (100, 1000)
# Longest time for an attempt to connect. A server whose machine is busy takes seconds to greet its clients.
CONNECT_MS = 10_000


class DeadlineInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Gives calls without a timeout `default_seconds`."""

    def __init__(self, default_seconds: float) -> None:
        self._default = default_seconds

    def _intercept(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        if details.timeout is None:
            details = with_details(details, timeout=self._default)
        return continuation(details, request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept


def message_options(settings: RpcSettings) -> list[tuple[str, Any]]:
    limit = settings.max_message_mb << 20
    return [("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit)]


def connect(address: str, settings: RpcSettings | None = None) -> grpc.Channel:
    """Returns a channel to "host:port" for the generated stubs. It connects at the first call.

    Every call has a deadline (`call_timeout_seconds` where none is passed), is repeated while the server is unavailable
    (`RetryInterceptor` says which), and raises the SlimeError that the server raised. `tls_ca` turns TLS on. The token
    comes from `token_file`; without it, `token_files` finds that of a service of this user on the loopback.
    Raises InvalidSetting for an invalid address, or a token that would cross the network in plain text.
    """
    settings = settings or RpcSettings()
    check_address(address)
    # A proxy in the environment must not see calls between our services. A peer that vanished without closing its
    # connection is noticed by pings during calls that wait.
    options = [
        *message_options(settings),
        # The thread that reads a server stream drives it, so that a short one does not start a thread of its own.
        (ChannelOptions.SingleThreadedUnaryStream, 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        # gRPC's default pauses grow to two minutes, so clients would return long after their server.
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS[0]),
        # Despite its name it is not a pause: it limits the time of an attempt to connect, whose failure ends a call.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MS[1]),
    ]
    credentials = channel_credentials(settings)
    if credentials is None:
        channel = grpc.insecure_channel(address, options)
    else:
        channel = grpc.secure_channel(address, credentials, options)
    token = token_source(address, settings)
    # The first is the outermost: errors name the deadline, and all attempts of a retry share it.
    interceptors: list[Any] = [
        DeadlineInterceptor(settings.call_timeout_seconds),
        RaisingInterceptor(address),
        RetryInterceptor(settings.retry_seconds, token),
        TokenInterceptor(token),
    ]
    return grpc.intercept_channel(channel, *interceptors)
