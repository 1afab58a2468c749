"""Environments behind an OpenEnv server, as games for `slime.rollout.adapters.gym.episodes`.

OpenEnv's protocol is spoken here, so that its package is not needed: a WebSocket at URL/ws for each episode, and on it

    {"type": "reset", "data": {"seed": 1}}    {"type": "step", "data": ACTION}    {"type": "close"}

answered by {"type": "observation", "data": {"observation": {...}, "reward": 1.0, "done": false}}, or by an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from slime.types.errors import InvalidField, InvalidSetting, RemoteError, Unavailable

log = logging.getLogger(__name__)

# Seconds between two tries for a session on a full server.
PAUSE_SECONDS = 0.5
MOST_BYTES = 16 << 20
# Maximum number of messages that wait unread: a full server sends an error unasked, a faulty one may send any number.
MOST_WAITING = 2
CLOSE_SECONDS = 5.0
MOST_REWARD = sys.float_info.max
# Errors about an action. The model wrote the action, so its episode ends, and the run continues.
ACTION_ERRORS = ("VALIDATION_ERROR", "EXECUTION_ERROR")


class OpenEnv:
    """An environment with the interface of gymnasium, asynchronous.

    url: of the server, `http://HOST:PORT`. action: the field that takes the model's text, or a function from the text
    to the action. observation: the field that the model reads, or a function from the observation to text.
    options: further values for each reset. headers: sent when a session is opened, for a server behind a login.
    step_seconds: time that the server may take for an answer. wait_seconds: time that an episode waits for a session
    on a full server. refused: reward of an action that the server refuses, which ends the episode.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str | Callable[[str], dict[str, Any]],
        observation: str | Callable[[dict[str, Any]], str],
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        step_seconds: float = 60.0,
        wait_seconds: float = 600.0,
        refused: float = 0.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidSetting.must_be("the address of an OpenEnv server", "http://HOST:PORT", got=url)
        self.url = url.rstrip("/")
        self._action, self._observation = action, observation
        self._options, self._headers = dict(options or {}), dict(headers or {})
        self._step_seconds, self._wait_seconds, self._refused = step_seconds, wait_seconds, refused
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._answers: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None

    async def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode in a session of its own. Raises Unavailable if no server answers, or if it stays full."""
        await self.close()
        data = self._options if seed is None else self._options | {"seed": seed}
        give_up = time.monotonic() + self._wait_seconds
        while True:
            await self._connect()
            answer = await self._ask({"type": "reset", "data": data})
            if answer["type"] == "observation":
                return self._text(answer["data"]), {}
            await self.close()
            if answer["data"].get("code") != "CAPACITY_REACHED":
                raise RemoteError(f"the OpenEnv server {self.url} cannot reset: {_reason(answer)}", field="reset")
            if time.monotonic() > give_up:
                raise Unavailable(
                    f"the OpenEnv server {self.url} had no room for a session in {self._wait_seconds:g} s: "
                    f"{_reason(answer)}; start it with a larger max_concurrent_envs",
                    field="max_concurrent_envs",
                )
            await asyncio.sleep(PAUSE_SECONDS)

    async def step(self, action: str, /) -> tuple[str, float, bool, bool, dict[str, Any]]:
        fields = {self._action: action} if isinstance(self._action, str) else self._action(action)
        answer = await self._ask({"type": "step", "data": fields})
        if answer["type"] == "error":
            if answer["data"].get("code") not in ACTION_ERRORS:
                raise RemoteError(f"the OpenEnv server {self.url} cannot step: {_reason(answer)}", field="step")
            log.warning("the OpenEnv server refuses an action, which ends its episode: %s", _reason(answer))
            return "", self._refused, True, False, {"error": _reason(answer)}
        data = answer["data"]
        done = bool(data.get("done"))
        # Nothing reads the last observation, which need not have the field.
        return "" if done else self._text(data), self._reward(data), done, False, {}

    async def close(self) -> None:
        """Ends the session at the server, if there is one."""
        session, socket, reader = self._session, self._socket, self._reader
        self._session = self._socket = self._reader = None
        try:
            if socket is not None and not socket.closed:
                # Limited in time, because a server that no longer reads would block this message.
                async with asyncio.timeout(CLOSE_SECONDS):
                    await socket.send_str('{"type": "close"}')
        except (ConnectionError, TimeoutError, aiohttp.ClientError):
            log.debug("the server had closed the session", exc_info=True)
        finally:
            if reader is not None:
                reader.cancel()
            if session is not None:
                await session.close()

    async def _refuse_redirect(self, _: object, __: object, params: aiohttp.TraceRequestRedirectParams) -> None:
        asked = str(params.response.url)
        to = urljoin(asked, params.response.headers.get("Location", ""))
        if self._headers and urlsplit(to)[:2] != urlsplit(asked)[:2]:
            raise aiohttp.ClientError(f"it redirects to {to}, which is not sent the headers: name it, if you trust it")

    async def _connect(self) -> None:
        # Another host than the user named would get the headers, which may hold a key.
        refuse = aiohttp.TraceConfig()
        refuse.on_request_redirect.append(self._refuse_redirect)
        self._session = aiohttp.ClientSession(headers=self._headers, trace_configs=[refuse])
        try:
            async with asyncio.timeout(self._step_seconds):
                self._socket = await self._session.ws_connect(f"{self.url}/ws", max_msg_size=MOST_BYTES)
        except TimeoutError as error:
            await self.close()
            raise Unavailable(
                f"no OpenEnv server answers at {self.url}/ws within {self._step_seconds:g} s", field="url"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            await self.close()
            raise Unavailable(f"no OpenEnv server answers at {self.url}/ws: {error}", field="url") from error
        self._answers = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(self._socket, self._answers))

    @staticmethod
    async def _read(socket: aiohttp.ClientWebSocketResponse, answers: asyncio.Queue[aiohttp.WSMessage]) -> None:
        """Reads messages, also while the model generates: a server ends a session whose pings are not answered."""
        while True:
            message = await socket.receive()
            if answers.qsize() >= MOST_WAITING:
                log.warning("the OpenEnv server sends messages that nobody asked for: its session is closed")
                while not answers.empty():
                    answers.get_nowait()
                answers.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None))
                await socket.close()
                return
            answers.put_nowait(message)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer, an observation or an error. Raises RemoteError for anything else."""
        if self._socket is None:
            raise InvalidField("episode", "none", "reset() before step()")
        request = message["type"]
        unasked = self._answers.qsize() > 0
        try:
            async with asyncio.timeout(self._step_seconds):
                # A server that is full sends its error and closes before it reads anything.
                if not self._socket.closed:
                    await self._socket.send_str(json.dumps(message))
                answer = await self._answers.get()
        except TimeoutError:
            raise RemoteError(
                f"the OpenEnv server {self.url} did not answer a {request} in {self._step_seconds:g} s", field=request
            ) from None
        except (ConnectionError, aiohttp.ClientError) as error:
            raise RemoteError(f"the OpenEnv server {self.url} ended the session: {error}", field=request) from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise RemoteError(
                f"the OpenEnv server {self.url} ended the session before it answered a {request}", field=request
            )
        try:
            parsed = json.loads(answer.data)
        except (ValueError, RecursionError):
            parsed = None
        if not _is_answer(parsed):
            raise RemoteError(
                f"the OpenEnv server {self.url} answered a {request} with {answer.data:.200}", field=request
            )
        if unasked and parsed["type"] == "observation":
            # From here on, each answer would be taken as the answer to the action after its own.
            raise RemoteError(f"the OpenEnv server {self.url} answered a {request} before it was asked", field=request)
        return parsed

    def _reward(self, data: dict[str, Any]) -> float:
        reward = data.get("reward")
        if reward is None:
            return 0.0
        if not isinstance(reward, (int, float)) or not -MOST_REWARD <= reward <= MOST_REWARD:
            got = f"{reward!r:.200}"
            raise RemoteError(
                f"the OpenEnv server {self.url} answered a step with the reward {got}, expected a finite number",
                field="reward", value=got, expected="a finite number",
            )  # fmt: skip
        return float(reward)

    def _text(self, data: dict[str, Any]) -> str:
        seen = data.get("observation") or {}
        if not isinstance(self._observation, str):
            return self._observation(seen)
        if self._observation not in seen:
            known = ", ".join(sorted(seen)) or "no fields"
            raise InvalidField(
                "observation", self._observation, f"a field of the observation: {known}",
                f"the observations of the OpenEnv server {self.url} have no field {self._observation!r}, only {known}",
            )  # fmt: skip
        return str(seen[self._observation])


def _is_answer(parsed: Any) -> bool:
    if not isinstance(parsed, dict) or parsed.get("type") not in ("observation", "error"):
        return False
    data = parsed.get("data")
    return isinstance(data, dict) and isinstance(data.get("observation") or {}, dict)


def _reason(answer: dict[str, Any]) -> str:
    data = answer["data"]
    details = f" {json.dumps(data['errors'], default=str):.300}" if data.get("errors") else ""
    return f"{data.get('code', 'error')!s:.100}: {data.get('message', '')!s:.1000}{details}"
