"""Limits the number of a server's connections, and the time in which each must send the head of a request."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections import OrderedDict
from typing import Any, cast

from aiohttp import web

MOST = 4096
# Open files that the process needs besides its connections.
OTHER_FILES = 128
HEAD_SECONDS = 10.0
# The deadline of a head is counted in so many ticks. An event loop that is held up counts few of them, and reads what
# has arrived between two: time in which the server read nothing is not held against the client.
TICKS = 10
# Seconds for which aiohttp keeps idle connections, and unread bodies.
KEEP_ALIVE_SECONDS = 60.0
LINGERING_SECONDS = 2.0


class Connections:
    """The connections of a server. Used on one event loop.

    most: connections at once. Above that, the connection that has waited longest for a head is dropped, or the new one
    where all others have requests. head_seconds: the deadline of a head.
    """

    def __init__(self, *, most: int = MOST, head_seconds: float = HEAD_SECONDS) -> None:
        self.most = min(most, max(16, _raise_file_limit(most + OTHER_FILES) - OTHER_FILES))
        self.head_seconds = head_seconds
        self.open: dict[asyncio.BaseTransport, _Connection] = {}
        # Connections without a request, the oldest first.
        self.waiting: OrderedDict[_Connection, None] = OrderedDict()

    def runner(self, application: web.Application) -> web.AppRunner:
        """Returns the runner of an application. When a client disconnects, its request is cancelled."""
        application.middlewares.insert(0, self._middleware())
        return web.AppRunner(
            application, access_log=None, handler_cancellation=True, auto_decompress=False,
            keepalive_timeout=KEEP_ALIVE_SECONDS, lingering_time=LINGERING_SECONDS, shutdown_timeout=1.0,
        )  # fmt: skip

    async def serve(self, runner: web.AppRunner, listener: socket.socket) -> None:
        """Accepts connections until the runner is cleaned up."""
        await _Site(runner, self, listener).start()

    def _middleware(self) -> Any:
        @web.middleware
        async def count(request: web.Request, handler: Any) -> web.StreamResponse:
            connection = self.open.get(request.transport) if request.transport is not None else None
            if connection is None:
                return await handler(request)
            connection.request_begins()
            try:
                return await handler(request)
            finally:
                connection.request_ends()

        return count


class _Connection(asyncio.Protocol):
    """Stands between a transport and aiohttp's protocol, which has no deadline for a head."""

    def __init__(self, connections: Connections, inner: asyncio.Protocol) -> None:
        self._connections = connections
        self._inner: asyncio.Protocol | None = inner
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._inner is not None
        owner = self._connections
        # Ray uses uvloop where it is installed; its transports are not instances of asyncio's classes.
        self._transport = transport = cast(asyncio.Transport, transport)
        if len(owner.open) >= owner.most:
            if not owner.waiting:
                self._inner = None
                transport.abort()
                return
            next(iter(owner.waiting)).drop()
        owner.open[transport] = self
        self._wait_for_head()
        self._inner.connection_made(transport)

    def drop(self) -> None:
        # Removed at once, because the event loop closes the transport only on its next turn.
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def request_begins(self) -> None:
        self._requests += 1
        self._stop_waiting()

    def request_ends(self) -> None:
        self._requests -= 1

    def _wait_for_head(self) -> None:
        self._connections.waiting[self] = None
        self._tick(TICKS)

    def _tick(self, left: int) -> None:
        if not left:
            self.drop()
            return
        seconds = self._connections.head_seconds / TICKS
        self._timer = asyncio.get_running_loop().call_later(seconds, self._tick, left - 1)

    def _stop_waiting(self) -> None:
        self._connections.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forget(self) -> None:
        self._stop_waiting()
        if self._transport is not None:
            self._connections.open.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            return
        if not self._requests and self._timer is None:
            self._wait_for_head()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._inner is not None:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()


class _Site(web.BaseSite):
    def __init__(self, runner: web.AppRunner, connections: Connections, listener: socket.socket) -> None:
        super().__init__(runner)
        self._connections = connections
        self._listener = listener

    @property
    def name(self) -> str:
        return "http://{}:{}".format(*self._listener.getsockname()[:2])

    async def start(self) -> None:
        await super().start()
        make_inner = self._runner.server
        assert make_inner is not None
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self._connections, make_inner()), sock=self._listener, backlog=1024
        )


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Lets a server listen on the port of one that has just ended, whose connections still linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _raise_file_limit(wanted: int) -> int:
    """Returns the number of files that this process may have open, after asking for `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
