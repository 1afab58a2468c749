"""HTTP server in threads with a limit of connections, because every user of the machine can connect to the loopback.

Above the limit, the connection that has waited longest for a request is dropped; one that gets an answer never is.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

log = logging.getLogger(__name__)

# A browser opens six.
MOST_CONNECTIONS = 64


class LimitedServer(ThreadingHTTPServer):
    """Serves requests in one thread per connection, with at most `most` connections. handler: a `LimitedHandler`."""

    daemon_threads = True
    # With the default, 5, a few connections that come at once keep others waiting for seconds.
    request_queue_size = MOST_CONNECTIONS
    most = MOST_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[LimitedHandler]) -> None:
        """address: host and port; port 0 lets the system choose. Raises OSError if it is taken."""
        self._lock = threading.Lock()
        # Each connection, with True while it waits for a request; the one that has waited longest comes first.
        self._connections: dict[Any, bool] = {}
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._connections) >= self.most:
                self._drop_one()
            is_full = len(self._connections) >= self.most
            if not is_full:
                self._connections[request] = True
        if is_full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def _drop_one(self) -> None:
        for connection in [each for each, waits in self._connections.items() if waits][:1]:
            del self._connections[connection]
            with suppress(OSError):  # its client has left
                connection.shutdown(socket.SHUT_RDWR)  # ends its thread, which closes it

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keeps quiet about a client that leaves in the middle of an answer, for the sake of the run's terminal."""
        log.debug("a request failed", exc_info=True)

    def note(self, connection: Any, *, waits: bool) -> None:
        """Notes that a connection waits for a request from now on, or that it has got one."""
        with self._lock:
            if self._connections.pop(connection, None) is not None:
                self._connections[connection] = waits


class LimitedHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection of a `LimitedServer`."""

    server: LimitedServer

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        finally:
            self.server.note(self.connection, waits=True)

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.server.note(self.connection, waits=not parsed)
        return parsed
