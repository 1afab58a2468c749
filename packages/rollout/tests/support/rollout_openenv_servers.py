"""Servers of one environment in OpenEnv's protocol: that of the package openenv, and one that says what it was recorded
to say, for where the package is not installed. Both count the sessions that are open.

The environment shows a digit; an action of {"text": NEXT} earns a point, three end the episode, and one that is no
digit makes it raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from aiohttp import WSMsgType, web

FIELD_REQUIRED = {"type": "missing", "loc": ["text"], "msg": "Field required", "input": {"word": "5"}}


class Server:
    """Runs on a loop in a thread of its own. url: where. rooms: of sessions."""

    def __init__(self, rooms: int) -> None:
        self.rooms = rooms
        self.resets: list[dict[str, Any]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stop = self._do(self._start())

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def stop(self) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> Callable[[], Coroutine[Any, Any, None]]:
        raise NotImplementedError

    def sessions(self) -> int:
        raise NotImplementedError


class RecordedServer(Server):
    """Answers as openenv 0.10.0 did, and pings after a reset. is_alive: a ping was answered."""

    async def _start(self) -> Callable[[], Coroutine[Any, Any, None]]:
        self._open = 0
        self.is_alive = threading.Event()
        app = web.Application()
        app.router.add_get("/ws", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        return runner.cleanup

    def sessions(self) -> int:
        return self._open

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(autoping=False)
        await ws.prepare(request)
        if self._open == self.rooms:
            counts = {"active_sessions": self._open, "max_sessions": self.rooms}
            message = f"Server at capacity: {self._open}/{self.rooms} sessions active"
            await ws.send_json({"type": "error", "data": {"message": message, "code": "CAPACITY_REACHED"} | counts})
            await ws.close()
            return ws
        self._open += 1
        try:
            shown = first = 0
            async for message in ws:
                if message.type is WSMsgType.PONG:
                    self.is_alive.set()
                    continue
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    break
                if asked["type"] == "reset":
                    self.resets.append(asked["data"])
                    shown = first = asked["data"].get("seed", 0)
                    await ws.send_json(observation(shown, 0.0, False))
                    await ws.ping()
                elif "text" not in asked["data"]:
                    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [FIELD_REQUIRED]}
                    await ws.send_json({"type": "error", "data": data})
                elif not asked["data"]["text"].isdigit():
                    data = {"message": f"no digit: {asked['data']['text']}", "code": "EXECUTION_ERROR"}
                    await ws.send_json({"type": "error", "data": data})
                else:
                    shown += 1
                    gained = float(asked["data"]["text"] == str(shown))
                    await ws.send_json(observation(shown, gained, shown == first + 3))
        finally:
            self._open -= 1
        return ws


def observation(shown: int, reward: float, done: bool) -> dict[str, Any]:
    data = {"observation": {"metadata": {}, "digit": str(shown)}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


class BrokenServer(Server):
    """Answers a reset, and after it, or after a step, says what it is told to. reads: whether it goes on reading."""

    def __init__(self, after_reset: list[str], after_step: list[str], *, reads: bool = True) -> None:
        self.after_reset, self.after_step, self.reads = after_reset, after_step, reads
        super().__init__(rooms=1)

    async def _start(self) -> Callable[[], Coroutine[Any, Any, None]]:
        self._over = asyncio.Event()
        app = web.Application()
        app.router.add_get("/ws", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self._listener).start()

        async def stop() -> None:
            self._over.set()
            await runner.cleanup()

        return stop

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse()
        await ws.prepare(request)
        with contextlib.suppress(ConnectionError):
            async for message in ws:
                if json.loads(message.data)["type"] == "reset":
                    for text in [json.dumps(observation(1, 0.0, False)), *self.after_reset]:
                        await ws.send_str(text)
                    if not self.reads:
                        await self._over.wait()
                else:
                    for text in self.after_step:
                        await ws.send_str(text)
        return ws


class PackageServer(Server):
    """The server of the package openenv."""

    async def _start(self) -> Callable[[], Coroutine[Any, Any, None]]:
        uvicorn = importlib.import_module("uvicorn")
        app = _app(self.rooms, self.resets)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        done = asyncio.create_task(server.serve(sockets=[self._listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        self._env_server = app.state.env_server

        async def stop() -> None:
            server.should_exit = True
            await done

        return stop

    def sessions(self) -> int:
        return len(self._env_server._sessions)


def _app(rooms: int, resets: list[dict[str, Any]]) -> Any:
    package = importlib.import_module("openenv.core.env_server")
    types = importlib.import_module("openenv.core.env_server.types")
    fastapi = importlib.import_module("fastapi")
    pydantic = importlib.import_module("pydantic")
    action = pydantic.create_model("DigitAction", __base__=types.Action, text=(str, ...))
    seen = pydantic.create_model("DigitObservation", __base__=types.Observation, digit=(str, ...))

    class Digits(package.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Any:
            resets.append({"seed": seed} | more)
            self.shown = self.first = seed or 0
            return seen(digit=str(self.shown), reward=0.0, done=False)

        def step(self, action: Any, timeout_s: float | None = None, **more: Any) -> Any:
            if not action.text.isdigit():
                raise ValueError(f"no digit: {action.text}")
            self.shown += 1
            gained = float(action.text == str(self.shown))
            return seen(digit=str(self.shown), reward=gained, done=self.shown == self.first + 3)

        @property
        def state(self) -> Any:
            return types.State(step_count=self.shown - self.first)

    app = fastapi.FastAPI()
    app.state.env_server = package.HTTPEnvServer(Digits, action, seen, max_concurrent_envs=rooms)
    app.state.env_server.register_routes(app)
    return app
