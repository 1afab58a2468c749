"""gRPC server with health, reflection, limits, TLS, tokens and graceful shutdown."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slime.types.addresses import join_address
from slime.types.errors import DeadlineExceeded, InvalidSetting, PortInUse, SlimeError
from slime.types.rpc import token_files
from slime.types.rpc.auth import TokenCheck, check_exposure, read_token, server_credentials
from slime.types.rpc.channel import KEEPALIVE_MS, message_options
from slime.types.rpc.settings import RpcSettings
from slime.types.rpc.status import ErrorsToStatus

PING_STRIKES = 10


class Server:
    """Serves `servicers`, pairs of a generated `add_XServicer_to_server` and a servicer.

    Calls must carry the token in `settings.token_file`, or the token of a role that is derived from it (`roles`).
    Without that file a server on the loopback generates a token and publishes it in `token_file`; with `insecure`,
    calls need no token.

    service_names: full names such as "slime.v1.BufferService", for health and reflection.
    """

    def __init__(
        self,
        servicers: Sequence[tuple[Callable[[Any, grpc.Server], None], Any]],
        settings: RpcSettings,
        *,
        service_names: Sequence[str],
    ) -> None:
        check_exposure(settings)
        interceptors: list[grpc.ServerInterceptor] = [ErrorsToStatus()]
        self._token = read_token(settings)
        self._generated_token = self._token is None and not settings.insecure
        if self._generated_token:
            self._token = secrets.token_hex(32)
        if self._token is not None:
            interceptors.insert(0, TokenCheck(self._token))
        self.token_file: Path | None = Path(settings.token_file) if settings.token_file else None
        self._settings = settings
        self._pool = ThreadPoolExecutor(max_workers=settings.rpc_threads, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._pool,
            interceptors=interceptors,
            # Two servers on one port would share its calls: a second one must fail instead.
            options=[
                *message_options(settings),
                ("grpc.so_reuseport", 0),
                # Clients ping during long calls; by default gRPC takes the fourth ping for an attack.
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 3),
                ("grpc.http2.max_ping_strikes", PING_STRIKES),
            ],
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for add, servicer in servicers:
            add(servicer, self._server)
        self._names = tuple(service_names)
        if self._token is not None:
            names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)

    def start(self) -> str:
        """Starts serving; returns "host:port". Raises PortInUse, or InvalidSetting for a host of another machine."""
        settings = self._settings
        listen = join_address(settings.host, settings.port)
        host = listen.rpartition(":")[0]
        credentials = server_credentials(settings)
        _check_port_free(settings.host, settings.port)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise _cannot_listen(settings.host, settings.port, error) from None
        if self._generated_token:
            self.token_file = token_files.publish(f"{host}:{port}", str(self._token))
        self._server.start()
        for name in ("", *self._names):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{port}"

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Refuses new calls, lets running ones end within `grace_seconds`, then cancels them."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_seconds).wait(grace_seconds + 5.0)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._generated_token and self.token_file is not None:
            token_files.retract(self.token_file, str(self._token))

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns once the server was stopped; raises DeadlineExceeded after `timeout_seconds`."""
        if self._server.wait_for_termination(timeout_seconds):
            raise DeadlineExceeded(f"the server still serves after {timeout_seconds} s")


def _check_port_free(host: str, port: int) -> None:
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: Exception) -> SlimeError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE or "Address already in use" in str(error):
        return PortInUse(
            f"cannot listen on {host}:{port}: the port is in use", field="--port", value=port, expected="a free port"
        )
    return InvalidSetting(
        f"cannot listen on {host}:{port}: {error}", field="--host", value=host, expected="an address of this machine"
    )


class RunningService:
    """A service that runs until `stop`; `close` releases what it holds besides its server."""

    def __init__(self, server: Server, close: Callable[[], None] = lambda: None) -> None:
        self._server = server
        self._close = close
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.address = ""
        try:
            self.address = server.start()
        except BaseException:
            close()
            raise

    @property
    def token_file(self) -> Path | None:
        """Returns the file with the token of calls; None if calls need none."""
        return self._server.token_file

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Stops the service and releases what it holds. Safe to call twice."""
        with self._lock:
            if self._stopped.is_set():
                return
            try:
                self._server.stop(grace_seconds)
            finally:
                self._close()
                self._stopped.set()

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Returns once the service was stopped; raises DeadlineExceeded after `timeout_seconds`."""
        if not self._stopped.wait(timeout_seconds):
            raise DeadlineExceeded(f"{self.address} still serves after {timeout_seconds} s")

    def __enter__(self) -> RunningService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
