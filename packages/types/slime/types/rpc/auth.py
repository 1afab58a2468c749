"""Bearer tokens of calls and TLS credentials, both read from files."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Callable
from typing import Any

import grpc

from slime.types.errors import InvalidFile, InvalidSetting, PermissionDenied, SlimeError, Unauthenticated
from slime.types.files import read_bounded
from slime.types.rpc import token_files
from slime.types.rpc.details import with_details
from slime.types.rpc.retry import TokenSource
from slime.types.rpc.roles import Role, callers, role_token
from slime.types.rpc.settings import RpcSettings
from slime.types.rpc.status import abort_with
from slime.types.rpc.token_files import is_loopback

log = logging.getLogger(__name__)

HEADER = "authorization"
OPEN_SERVICES = ("/grpc.health.v1.Health/",)  # probes carry no token


def read_file(path: str, flag: str) -> bytes:
    """Returns the content of a file, stripped of whitespace. Raises MissingFile, or InvalidFile if it is empty."""
    content = read_bounded(path, flag).strip()
    if not content:
        raise InvalidFile(f"{flag}: {path} is empty", field=flag, value=path)
    return content


def read_secret(path: str, flag: str) -> bytes:
    """Returns the content of a file. Raises InvalidFile if everybody can read it, and warns if its group can."""
    content = read_file(path, flag)
    mode = os.stat(path).st_mode
    if mode & 0o007:
        raise InvalidFile(
            f"{flag}: every user can read or change {path} (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}",
            field=flag, value=path, expected="a file with mode 0600",
        )  # fmt: skip
    if mode & 0o070:
        log.warning("%s: the group of %s can use it (mode %04o)", flag, path, stat.S_IMODE(mode))
    return content


def read_token(settings: RpcSettings) -> str | None:
    return read_secret(settings.token_file, "--token-file").decode() if settings.token_file else None


def check_exposure(settings: RpcSettings) -> None:
    """Raises InvalidSetting for a server that others could reach without TLS and token."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        missing, present = ("--tls-cert", "--tls-key") if settings.tls_key else ("--tls-key", "--tls-cert")
        raise InvalidSetting.requires(present, f"{missing} FILE")
    if is_loopback(settings.host) or settings.insecure or (settings.tls_cert and settings.token_file):
        return
    raise InvalidSetting.requires(
        f"--host {settings.host}",
        "--tls-cert, --tls-key and --token-file, or --insecure",
        "it is not a loopback address, so others can reach it",
    )


def token_source(address: str, settings: RpcSettings) -> TokenSource:
    """Returns the source of a client's token: --token-file, or the file that the service at `address` published.

    Raises InvalidSetting where the token would cross a network in plain text.
    """
    token = read_token(settings)
    if token is None:
        return TokenSource(lambda: token_files.find(address))
    plain = not settings.tls_ca and not address.startswith("unix:")
    if plain and not settings.insecure and not is_loopback(address.rpartition(":")[0]):
        reason = "without TLS the token can be read on the network (--insecure sends it all the same)"
        raise InvalidSetting.requires("--token-file", f"--tls-ca FILE to call {address}", reason)
    return TokenSource(lambda: token)


def server_credentials(settings: RpcSettings) -> grpc.ServerCredentials | None:
    if not (settings.tls_cert and settings.tls_key):
        return None
    pair = (read_secret(settings.tls_key, "--tls-key"), read_file(settings.tls_cert, "--tls-cert"))
    return grpc.ssl_server_credentials([pair])


def channel_credentials(settings: RpcSettings) -> grpc.ChannelCredentials | None:
    if not settings.tls_ca:
        return None
    return grpc.ssl_channel_credentials(root_certificates=read_file(settings.tls_ca, "--tls-ca"))


class TokenCheck(grpc.ServerInterceptor):
    """Answers UNAUTHENTICATED to calls without a valid token, PERMISSION_DENIED to calls that a role may not make."""

    def __init__(self, token: str) -> None:
        self._token = _bearer(token)
        self._roles = {role: _bearer(role_token(token, role)) for role in Role}

    def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        error = None if details.method.startswith(OPEN_SERVICES) else self._error(details)
        handler = continuation(details)
        return handler if error is None or handler is None else _refuse(handler, error)

    def _error(self, details: grpc.HandlerCallDetails) -> SlimeError | None:
        received = str(dict(details.invocation_metadata).get(HEADER, "")).encode()
        if hmac.compare_digest(received, self._token):
            return None
        allowed = callers(details.method)
        for role, expected in self._roles.items():
            if hmac.compare_digest(received, expected):
                return None if role in allowed else _not_for(role, allowed, details.method)
        return Unauthenticated(
            "the call carries no valid bearer token", field=HEADER, expected="the token of the server's --token-file"
        )


def _bearer(token: str) -> bytes:
    return f"Bearer {token}".encode()


def _not_for(role: Role, allowed: frozenset[Role], method: str) -> PermissionDenied:
    needed = " or ".join(sorted(allowed)) or "the service itself"
    return PermissionDenied(
        f"a token for {role} may not call {method}: it needs the token for {needed}",
        field=HEADER, value=str(role), expected=f"the token for {needed}",
    )  # fmt: skip


def _refuse(handler: grpc.RpcMethodHandler, error: SlimeError) -> grpc.RpcMethodHandler:
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
    """Adds the token, if any, to every call."""

    def __init__(self, token: TokenSource) -> None:
        self._token = token

    def _intercept(self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any) -> Any:
        token = self._token.current()
        if token is not None:
            details = with_details(details, metadata=[*(details.metadata or ()), (HEADER, f"Bearer {token}")])
        return continuation(details, request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept
