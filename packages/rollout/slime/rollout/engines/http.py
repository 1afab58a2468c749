"""JSON over HTTP to one engine, with a deadline for each call and typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import aiohttp

from slime.rollout.engines.keys import bearer
from slime.rollout.engines.streams import refusal
from slime.types.errors import DeadlineExceeded, EngineError, InvalidField, SlimeError, Unauthenticated

log = logging.getLogger(__name__)

T = TypeVar("T")

# SGLang closes connections that were idle for 5 s; a POST sent on one at that moment is lost, and not sent again.
KEEP_ALIVE_SECONDS = 2.0
# A server short of CPU time may still lose a connection. How often a request is sent again, and after how many seconds.
REPEATS, REPEAT_SECONDS = 2, 0.1


def _fast_parser() -> Callable[[bytes], Any]:
    """Returns orjson's parser if it is installed, as it is with SGLang: many answers with long lists of log-probs
    arrive at once, and wait for the parser."""
    try:
        loads: Callable[[bytes], Any] = importlib.import_module("orjson").loads
    except ImportError:
        return json.loads
    return loads


_parse = _fast_parser()


def parsed(body: bytes) -> Any:
    """Returns the parsed JSON of `body`. Raises ValueError."""
    try:
        return _parse(body)
    except ValueError:
        # orjson accepts neither NaN nor infinity.
        return json.loads(body)


class EngineHTTP:
    """Calls one engine over HTTP. api_key: the key that the engine was started with.

    Calls raise InvalidField if the engine refuses a request (4xx; Unauthenticated for 401), EngineError if it cannot be
    reached, goes away or fails (5xx), DeadlineExceeded if it does not answer in time.

    Belongs to the event loop on which it is first used; close it there. closed: whether `close` was called.
    """

    def __init__(
        self, url: str, name: str = "engine", *, timeout_seconds: float = 60.0, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._headers = bearer(api_key)
        self._session: aiohttp.ClientSession | None = None
        self.closed = False

    async def get(self, path: str, *, timeout_seconds: float | None = None) -> Any:
        return await self.call("GET", path, timeout_seconds=timeout_seconds)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        repeatable: bool = False,
    ) -> Any:
        """Posts `body` as JSON. repeatable: see `call`."""
        return await self.call(
            "POST", path, json=body, headers=headers, timeout_seconds=timeout_seconds, repeatable=repeatable
        )

    async def call(
        self, method: str, path: str, *, timeout_seconds: float | None = None, repeatable: bool = False, **request: Any
    ) -> Any:
        """Returns the answer's JSON, or {"message": text}, because SGLang answers some calls with text or nothing.

        repeatable: whether the call may run twice, and so is sent again if its connection is lost before the answer.
        request: further arguments of aiohttp's `request`.
        """
        seconds = timeout_seconds or self.timeout_seconds

        async def send() -> tuple[aiohttp.ClientResponse, bytes]:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._opened().request(method, self.url + path, timeout=timeout, **request) as response:
                return response, await response.read()

        with self._explained(method, path, seconds):
            response, body = await self._repeated(send) if repeatable else await send()
        if response.status >= 400:
            raise self._refusal(method, path, response.status, body)
        try:
            answer = parsed(body)
        except ValueError:
            return {"message": body.decode(errors="replace")}
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(
                f"engine {self.name} could not {method} {path}: {answer.get('message') or answer}",
                field=self.name,
                value=path,
            )
        return answer

    async def follow(
        self,
        path: str,
        body: Mapping[str, Any],
        on_event: Callable[[Any], None],
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float,
        repeatable: bool = True,
    ) -> None:
        """Calls `on_event` with each of the server-sent events with which a POST is answered, up to [DONE]. If its
        connection is lost before the first event, the POST is sent again where it is `repeatable`.

        Events that are refusals raise the errors of `EngineHTTP`.
        """
        begun = False

        async def send() -> None:
            nonlocal begun
            timeout = aiohttp.ClientTimeout(total=timeout_seconds)
            async with self._opened().post(self.url + path, json=body, headers=headers, timeout=timeout) as response:
                if response.status >= 400:
                    raise self._refusal("POST", path, response.status, await response.read())
                rest = b""
                async for received in response.content.iter_any():
                    whole, end, rest = (rest + received).rpartition(b"\n\n")
                    for each in whole.split(b"\n\n") if end else ():
                        if each.startswith(b"data: {"):
                            begun = True
                            event = parsed(each.removeprefix(b"data: "))
                            if (refused := refusal(event)) is not None:
                                status, detail = refused
                                raise self._refusal("POST", path, status, json.dumps(detail).encode())
                            on_event(event)

        with self._explained("POST", path, timeout_seconds):
            await self._repeated(send, lambda: repeatable and not begun)
        if not begun:
            raise EngineError(f"engine {self.name} answered POST {path} with no event", field=self.name, value=path)

    async def relay(
        self,
        method: str,
        path: str,
        take: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        may_repeat: Callable[[], bool],
        *,
        timeout_seconds: float,
        **request: Any,
    ) -> T:
        """Returns what `take` makes of an answer, also of a refusal. If the connection is lost while `may_repeat`, the
        call is sent again."""

        async def send() -> T:
            timeout = aiohttp.ClientTimeout(total=timeout_seconds)
            async with self._opened().request(method, self.url + path, timeout=timeout, **request) as response:
                if response.status >= 500:
                    raise self._refusal(method, path, response.status, await response.read())
                return await take(response)

        with self._explained(method, path, timeout_seconds):
            return await self._repeated(send, may_repeat)

    async def _repeated(self, send: Callable[[], Awaitable[T]], may_repeat: Callable[[], bool] = lambda: True) -> T:
        session = self._opened()
        for _ in range(REPEATS):
            try:
                return await send()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError) as error:
                if isinstance(error, aiohttp.ClientConnectorError) or not may_repeat():
                    raise
                await asyncio.sleep(REPEAT_SECONDS)
                if self._session is not session:  # closed while this request waited
                    raise
                log.info("engine %s lost a request, sending it again: %s", self.name, error)
        return await send()

    @contextlib.contextmanager
    def _explained(self, method: str, path: str, seconds: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise DeadlineExceeded(
                f"engine {self.name}: no answer to {method} {path} in {seconds:g} s", field=path, value=seconds
            ) from None
        except aiohttp.ClientError as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
                reason = os.strerror(error.os_error.errno)
            raise EngineError(
                f"engine {self.name} at {self.url} is gone ({method} {path}: {reason})", field=self.name, value=reason
            ) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit on connections: rollouts keep hundreds of requests open at once, and the engine queues them.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def close(self) -> None:
        # Cleared before closing, so that a request about to be sent again notices it and does not use a closed session.
        session, self._session, self.closed = self._session, None, True
        if session is not None:
            await session.close()

    def _refusal(self, method: str, path: str, status: int, body: bytes) -> SlimeError:
        text = body.decode(errors="replace")
        try:
            detail = json.loads(text)
        except ValueError:
            detail = {}
        error = detail.get("error", detail) if isinstance(detail, dict) else {}
        error = error if isinstance(error, dict) else {"message": str(error)}
        message = f"engine {self.name} answered {method} {path} with {status}: {error.get('message') or text[:500]}"
        if status == 401:
            return Unauthenticated(
                f"{message}; an engine that was started elsewhere needs --rollout-engine-api-key-file",
                field="--rollout-engine-api-key-file", value=self.name, expected="the API key of the engine",
            )  # fmt: skip
        if 400 <= status < 500:
            field, value, expected = (str(error.get(key) or "") for key in ("field", "value", "expected"))
            return InvalidField(field, value, expected, message)
        return EngineError(message, field=self.name, value=status)
