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
from slime.types.errors import DeadlineExceeded, EngineError, InvalidField, SlimeError, Unauthenticated

log = logging.getLogger(__name__)

T = TypeVar("T")

# SGLang closes a connection that was idle for 5 s; a POST that meets the closing end is lost, and is not sent again.
KEEP_ALIVE_SECONDS = 2.0
# A starved server may lose a connection all the same. Times that a request is sent again, and seconds before.
REPEATS, REPEAT_SECONDS = 2, 0.1


def _fast_parser() -> Callable[[bytes], Any]:
    """Returns orjson, which SGLang brings along: the log-probs of a rollout's answers arrive at once, and wait for
    this."""
    try:
        loads: Callable[[bytes], Any] = importlib.import_module("orjson").loads
    except ImportError:
        return json.loads
    return loads


_parse = _fast_parser()


def parsed(body: bytes) -> Any:
    """Returns the JSON of `body`. Raises ValueError."""
    try:
        return _parse(body)
    except ValueError:
        # orjson takes neither NaN nor infinity.
        return json.loads(body)


class EngineHTTP:
    """Calls one engine by HTTP. api_key: what the engine was started with. Raises InvalidField where the engine refuses
    a request (4xx; 401 is Unauthenticated), EngineError where it cannot be reached, goes away or fails (5xx),
    DeadlineExceeded where it does not answer in time.

    Belongs to the event loop that it is first used in; close it there (`async with` does).
    """

    def __init__(
        self, url: str, name: str = "engine", *, timeout_seconds: float = 60.0, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._headers = bearer(api_key)
        self._session: aiohttp.ClientSession | None = None

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
        """Posts `body` as JSON. repeatable: as of `call`."""
        return await self.call(
            "POST", path, json=body, headers=headers, timeout_seconds=timeout_seconds, repeatable=repeatable
        )

    async def call(
        self, method: str, path: str, *, timeout_seconds: float | None = None, repeatable: bool = False, **request: Any
    ) -> Any:
        """Returns the answer's JSON, or {"message": text}: SGLang answers some calls with text, or with nothing.

        repeatable: twice is as good as once, so a request whose connection is lost before its answer is sent again.
        request: what aiohttp takes.
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
    ) -> Any:
        """Returns the last of the server-sent events that a POST is answered with. One that is lost before its first
        event is sent again.

        on_event: gets each, but of several that arrive together only the last: it says all that those before it said.
        """
        last: Any = None

        async def send() -> None:
            nonlocal last
            timeout = aiohttp.ClientTimeout(total=timeout_seconds)
            async with self._opened().post(self.url + path, json=body, headers=headers, timeout=timeout) as response:
                if response.status >= 400:
                    raise self._refusal("POST", path, response.status, await response.read())
                rest = b""
                async for received in response.content.iter_any():
                    whole, end, rest = (rest + received).rpartition(b"\n\n")
                    events = [each for each in whole.split(b"\n\n") if each.startswith(b"data: {")] if end else []
                    if events:
                        text = events[-1].removeprefix(b"data: ")
                        last = parsed(text)
                        if "error" in last:
                            raise self._refusal("POST", path, 500, text)
                        on_event(last)

        with self._explained("POST", path, timeout_seconds):
            await self._repeated(send, lambda: last is None)
        if last is None:
            raise EngineError(f"engine {self.name} answered POST {path} with no event", field=self.name, value=path)
        return last

    async def _repeated(self, send: Callable[[], Awaitable[T]], may_repeat: Callable[[], bool] = lambda: True) -> T:
        session = self._opened()
        for _ in range(REPEATS):
            try:
                return await send()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError) as error:
                if isinstance(error, aiohttp.ClientConnectorError) or not may_repeat():
                    raise
                await asyncio.sleep(REPEAT_SECONDS)
                if self._session is not session:  # closed: another client has taken its place
                    raise
                log.info("engine %s lost a request, which is sent again: %s", self.name, error)
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
            # Rollouts keep hundreds of requests open at once; the engine queues them.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    async def close(self) -> None:
        # Forgotten first: a request that is about to be sent again sees that it is over, and does not find it closed.
        session, self._session = self._session, None
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
