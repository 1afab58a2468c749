"""A bearer token on every call, read from a file, and TLS credentials, read from files."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, Unauthenticated
from slime.types.rpc.details import with_details
from slime.types.rpc.settings import RpcSettings
from slime.types.rpc.status import abort_with

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADER = "authorization"
OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # probes carry no token


def read_secret(path: str, flag: str) -> bytes:
    try:
        content = Path(path).read_bytes().strip()
    except FileNotFoundError:
        raise MissingFile(f"{flag}: no such file {path}", field=flag, value=path) from None
    if not content:
        raise InvalidFile(f"{flag}: {path} is empty", field=flag, value=path)
    return content


def read_token(settings: RpcSettings) -> str | None:
    return read_secret(settings.token_file, "--token-file").decode() if settings.token_file else None


def check_exposure(settings: RpcSettings) -> None:
    """Raises InvalidSetting for a server that others could reach without TLS and token."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise InvalidSetting("--tls-cert and --tls-key go together", field="--tls-cert")
    if settings.host in LOOPBACK or settings.insecure or (settings.tls_cert and settings.token_file):
        return
    raise InvalidSetting(
        f"--host {settings.host}: listening beyond loopback needs --tls-cert, --tls-key and --token-file, "
        "or --insecure",
        field="--host",
        value=settings.host,
        expected="a loopback address",
    )


def server_credentials(settings: RpcSettings) -> grpc.ServerCredentials | None:
    if not (settings.tls_cert and settings.tls_key):
        return None
    pair = (read_secret(settings.tls_key, "--tls-key"), read_secret(settings.tls_cert, "--tls-cert"))
    return grpc.ssl_server_credentials([pair])


def channel_credentials(settings: RpcSettings) -> grpc.ChannelCredentials | None:
    if not settings.tls_ca:
        return None
    return grpc.ssl_channel_credentials(root_certificates=read_secret(settings.tls_ca, "--tls-ca"))


class TokenCheck(grpc.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith(OPEN_SERVICES):
            return continuation(details)
        given = dict(details.invocation_metadata).get(HEADER, "")
        if hmac.compare_digest(given.encode(), self._expected):
            return continuation(details)
        handler = continuation(details)
        return None if handler is None else _refuse(handler)


def _refuse(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    error = Unauthenticated(
        "the call carries no valid bearer token", field=HEADER, expected="the token of the server's --token-file"
    )

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        abort_with(context, error)

    def stream(request: Any, context: grpc.ServicerContext) -> Any:
        abort_with(context, error)
        yield

    kind = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(handler.request_streaming, handler.response_streaming)]
    return kind(
        stream if handler.response_streaming else answer, handler.request_deserializer, handler.response_serializer
    )


class TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token to every call."""

    def __init__(self, token: str) -> None:
        self._header = (HEADER, f"Bearer {token}")

    def _intercept(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        return continuation(with_details(details, metadata=[*(details.metadata or ()), self._header]), request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept
