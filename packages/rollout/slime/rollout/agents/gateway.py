"""The endpoint that agents call: one URL per session; behind it, engines are called with tokens and return tokens.

    POST /sessions/ID/v1/chat/completions and the other paths of `Front`    GET /sessions/ID/v1/models, /health

A session's id serves as its key: it is random, unknown to others, and invalid once the session is closed. If the
gateway listens beyond the loopback interface, every request must carry the gateway's API key as well.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from slime.rollout.agents.render import Renderer
from slime.rollout.agents.session_backend import SessionBackend
from slime.rollout.agents.sessions import Session
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.chat.front import Front, refusal, status_of
from slime.rollout.chat.protocols.openai_chat import error_body
from slime.rollout.doors import Access, Bodies, Connections, Workers, check_exposure, listen
from slime.rollout.doors.bodies import too_deep
from slime.rollout.engines.keys import read_key
from slime.rollout.generate.state import RolloutState
from slime.types.errors import NotFound, PortInUse, SlimeError
from slime.types.rpc.token_files import is_loopback

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0


class Gateway:
    """The HTTP server that agents call. Used on the loop of `state` only.

    api_key: the key that agents must send; None where no key is required. Raises InvalidSetting if the renderer does
    not fit the tokenizer, or if other machines could reach the gateway without a key.
    """

    def __init__(self, state: RolloutState, settings: AgentSettings) -> None:
        self.state = state
        self.settings = settings
        self.renderer = Renderer(
            state.tokenizer,
            template_kwargs=state.args.apply_chat_template_kwargs,
            cumulative=settings.cumulative_token_mode,
            family=settings.renderer_family,
        )
        path = settings.gateway_api_key_file
        self.api_key = None if path is None else read_key(path, "gateway_api_key_file")
        check_exposure(settings.gateway_host, self.api_key, "gateway_host", "gateway_api_key_file")
        tunnel = urlsplit(settings.gateway_url or "").hostname
        self._access = Access(settings.gateway_host, api_key=self.api_key, names=[tunnel] if tunnel else [])
        self._bodies = Bodies()
        self._workers = Workers("gateway")
        # The URL of the address that the gateway listens on, and the one that agents use.
        self.local_url = self.url = ""
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Starts to listen. Raises PortInUse if the port is taken."""
        self.settings.set_log_level()
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        Front(self._bodies.json, self._backend).add_routes(app, "/sessions/{session}")
        host, port = self.settings.gateway_host, self.settings.gateway_port
        try:
            listener = listen(host, port)
        except OSError as error:
            raise PortInUse(
                f"the gateway of the agents cannot listen on {host}:{port}: {error}",
                field="gateway_port", value=port, expected="a free port, or 0",
            ) from error  # fmt: skip
        connections = Connections()
        self._runner = connections.runner(app)
        await self._runner.setup()
        await connections.serve(self._runner, listener)
        url_host = f"[{host}]" if ":" in host else host
        self.local_url = f"http://{url_host}:{listener.getsockname()[1]}"
        self.url = (self.settings.gateway_url or self.local_url).rstrip("/")
        log.info("agents reach the engines at %s", self.url)
        if self.settings.region is not None and is_loopback(urlsplit(self.url).hostname or ""):
            log.warning(
                "agents on AWS cannot reach %s: set gateway_host, or gateway_url to the URL of a tunnel to it", self.url
            )

    async def stop(self) -> None:
        for session_id in list(self._sessions):
            await self.close_session(session_id)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._workers.close()

    def open_session(self, session: Session) -> str:
        """Opens a session; returns its base URL for OpenAI clients."""
        self._sessions[session.id] = session
        return f"{self.url}/sessions/{session.id}/v1"

    async def close_session(self, session_id: str) -> None:
        """Closes a session and ends its requests, at the engines too. Does nothing if it is closed already."""
        session = self._sessions.pop(session_id, None)
        if session is None or not session.running:
            return
        # The engines are told before the tasks end: afterwards nobody knows which engine has their requests.
        try:
            await asyncio.wait_for(self.state.fleet.abort(sorted(session.open_requests)), CLOSE_SECONDS)
        except (SlimeError, TimeoutError) as error:
            log.warning("requests of session %s could not be ended: %s", session_id, error)
        finally:
            for task in session.running:
                task.cancel()

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    @property
    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            try:
                self._access.check(request)
                return await handler(request)
            except RecursionError:
                return _refusal(request.path, too_deep())
            except SlimeError as error:
                log.info("%s: %s", request.path, error)
                return _refusal(request.path, error)

        return guard

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self.settings.model_id, "object": "model", "created": 0, "owned_by": "slime"}
        return web.json_response({"object": "list", "data": [model]})

    def _backend(self, request: web.Request) -> SessionBackend:
        session = self._session(request)
        return SessionBackend(self.state, self.settings, self.renderer, self._workers, session, self._sessions)

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise NotFound("no such session, or it is closed", field="session", expected="an open session")
        return session


def _refusal(path: str, error: SlimeError) -> web.Response:
    status = status_of(error)
    return refusal(path, error) or web.json_response(error_body(error, status), status=status)
