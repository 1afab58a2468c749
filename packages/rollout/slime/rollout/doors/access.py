"""Checks of a request before its handler runs: host, origin, key, content type.

A web page open in a browser on this machine can send requests to loopback. But it cannot hide its `Origin`, cannot send
JSON without a preflight request, and with DNS rebinding its `Host` names the page's own domain. Other users of the
machine do not have the key.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from slime.types.errors import InvalidField, InvalidSetting, Unauthenticated
from slime.types.rpc.token_files import is_loopback

JSON = "application/json"
BYTES = "application/octet-stream"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_NO_PICKLES = (
    "the body must be safetensors (application/octet-stream): SGLang's JSON form carries pickles, "
    "and unpickling runs whatever code the sender put in"
)


class Refused(InvalidField):
    """A request that is refused before its handler runs; it is answered with `http_status`."""

    http_status = 403

    def __init__(self, http_status: int, field: str, value: object, expected: str, message: str = "") -> None:
        super().__init__(field, value, expected, message)
        self.http_status = http_status


class Access:
    """Checks who may call a server.

    host: the address that the server listens on. names: other host names that callers may use for it. api_key: the key
    that every call must carry as `Authorization: Bearer`, or as `x-api-key` (Anthropic's clients), except calls of
    `open_paths`. content_types: the content type of each path that does not take JSON.
    """

    def __init__(
        self,
        host: str,
        *,
        api_key: str | None = None,
        names: Iterable[str] = (),
        open_paths: Collection[str] = ("/health",),
        content_types: Mapping[str, str] | None = None,
    ) -> None:
        self._names = {host.lower(), *(name.lower() for name in names)}
        self._api_key = None if api_key is None else api_key.encode()
        self._open_paths = open_paths
        self._content_types = content_types or {}

    @property
    def middleware(self) -> Any:
        """An aiohttp middleware that checks each request before its handler runs."""

        @web.middleware
        async def check(request: web.Request, handler: Any) -> web.StreamResponse:
            self.check(request)
            return await handler(request)

        return check

    def check(self, request: web.Request) -> None:
        """Raises Refused for a wrong host, origin or content type, Unauthenticated for a missing or wrong key."""
        self._check_host(request)
        self._check_origin(request)
        if self._api_key is not None and request.path not in self._open_paths:
            sent = (request.headers.get("Authorization", ""), f"Bearer {request.headers.get('x-api-key', '')}")
            expected = b"Bearer " + self._api_key
            if not any(hmac.compare_digest(key.encode("utf-8", "surrogateescape"), expected) for key in sent):
                raise Unauthenticated(
                    "the request carries no valid API key", field="Authorization", expected="Bearer and the API key"
                )
        self._check_content(request)

    def _check_host(self, request: web.Request) -> None:
        host = request.headers.get("Host", "")
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
        except ValueError:
            name = ""
        listening_at = request.transport.get_extra_info("sockname") if request.transport is not None else None
        known = self._names | {"localhost"} | ({listening_at[0].removeprefix("::ffff:")} if listening_at else set())
        if name not in known and not is_loopback(name):
            raise Refused(
                403, "Host", host, "the address that this server listens on, or a name that it was started with"
            )

    def _check_origin(self, request: web.Request) -> None:
        origin = request.headers.get("Origin")
        if origin is not None and origin not in (f"http://{request.host}", f"https://{request.host}"):
            raise Refused(403, "Origin", origin, "none: web pages may not call this server")

    def _check_content(self, request: web.Request) -> None:
        if request.method in SAFE_METHODS or not request.body_exists:
            return
        wanted = self._content_types.get(request.path, JSON)
        if "Content-Type" not in request.headers or request.content_type != wanted:
            content_type = request.headers.get("Content-Type", "none")
            why = _NO_PICKLES if wanted == BYTES else ""
            raise Refused(415, "Content-Type", content_type, wanted, why)
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(415, "Content-Encoding", request.headers["Content-Encoding"], "none")


def check_exposure(host: str, api_key: str | None, flag: str, key_flag: str) -> None:
    """Raises InvalidSetting for a server that other machines could reach without a key. flag: that of the address."""
    if api_key is None and not is_loopback(host):
        raise InvalidSetting.requires(f"{flag} {host}", key_flag, "other machines can connect to this address")
