"""HTTP server of the page: read-only, on the loopback, only for the user who started it.

The path of every request begins with a random word, which only the printed address has, so other users of the machine
and web pages do not get in. `Host` must be the address itself, and so must `Origin`, if a browser sends one.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

from slime.launcher.platform.http_server import LimitedHandler, LimitedServer
from slime.types.errors import SlimeError

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
# Seconds that a client may take to send its headers.
REQUEST_SECONDS = 10.0
HEADERS = {
    # The page itself has a stricter policy for scripts.
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageServer(LimitedServer):
    """Serves `page` at /WORD/ and answers at /WORD/data/NAME?PARAMETERS."""

    def __init__(self, page: str, answer: Callable[[str, dict[str, str]], Any], port: int = 0) -> None:
        """port: 0 lets the system choose. Raises OSError if it is taken."""
        super().__init__((LOOPBACK, port), _Handler)
        self.page = page.encode()
        self.answer = answer
        self.word = secrets.token_urlsafe(16)
        self._word_once: str | None = None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.word}/"

    def url_once(self) -> str:
        """Returns an address that works only once, because other users can read the command line of a browser."""
        self._word_once = secrets.token_urlsafe(16)
        return f"http://{LOOPBACK}:{self.server_port}/{self._word_once}/"

    def is_word_once(self, word: str) -> bool:
        known = self._word_once
        if known is None or not hmac.compare_digest(word.encode(), known.encode()):
            return False
        self._word_once = None
        return True

    @property
    def hosts(self) -> set[str]:
        return {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}


class _Handler(LimitedHandler):
    server: PageServer
    timeout = REQUEST_SECONDS
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "slime", ""

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "") not in self.server.hosts:
            return self._refuse(HTTPStatus.FORBIDDEN, "Host is not the address of this server")
        origin = self.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] not in self.server.hosts:
            return self._refuse(HTTPStatus.FORBIDDEN, "Origin is another site")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return self._refuse(HTTPStatus.FORBIDDEN, "the request comes from another site")
        path, _, query = self.path.partition("?")
        word, _, name = path.removeprefix("/").partition("/")
        if name == "" and self.server.is_word_once(word):
            return self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", Location=f"/{self.server.word}/")
        if not hmac.compare_digest(word.encode(), self.server.word.encode()):
            return self._refuse(HTTPStatus.NOT_FOUND, "no such page: use the address that `slime show` printed")
        if name == "":
            return self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        if not name.startswith("data/"):
            return self._refuse(HTTPStatus.NOT_FOUND, "no such page")
        try:
            found = self.server.answer(name.removeprefix("data/"), dict(parse_qsl(query)))
            body = json.dumps(found, allow_nan=False, separators=(",", ":")).encode()
        except SlimeError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            # The run may be writing or removing the file that is read; the page asks again.
            log.debug("%s", self.path, exc_info=True)
            return self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        self._send(HTTPStatus.OK, "application/json", body)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send(status, "application/json", json.dumps({"error": reason}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
