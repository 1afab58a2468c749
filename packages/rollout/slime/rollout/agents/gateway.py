"""The endpoint that agents call: OpenAI's protocol with one URL per session, token in and token out behind it.

    POST /sessions/ID/v1/chat/completions, /sessions/ID/v1/completions    GET /sessions/ID/v1/models, /health

The id of a session is the key to it: random, unknown to others, and worth nothing once the session is closed. Beyond
the loopback every request carries the gateway's API key as well. Sampling follows the session, not the request, which
may only ask for fewer tokens and for stops of its own: what is trained on must have been drawn as the trainer assumes.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from slime.rollout.agents import openai_format
from slime.rollout.agents.render import Renderer
from slime.rollout.agents.sessions import JSON, Session, Turn
from slime.rollout.agents.settings import AgentSettings
from slime.rollout.chat.answers import parse_answer
from slime.rollout.chat.messages import clean
from slime.rollout.chat.openai_body import include_usage
from slime.rollout.chat.template import check_arguments, encode
from slime.rollout.doors import Access, Bodies, Connections, Workers, check_exposure, listen
from slime.rollout.doors.bodies import too_deep
from slime.rollout.engines.keys import read_key
from slime.rollout.generate.seeds import sampling_seed
from slime.rollout.generate.state import RolloutState
from slime.types.errors import EngineError, InvalidField, NotFound, PortInUse, SlimeError, Unavailable, WrongState
from slime.types.rpc.token_files import is_loopback

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
HTTP_STATUS = {
    "INVALID_ARGUMENT": 400, "UNAUTHENTICATED": 401, "NOT_FOUND": 404,
    "FAILED_PRECONDITION": 503, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip


class Gateway:
    """Used on the loop of `state` only. api_key: what agents send as `Authorization: Bearer`; None: nothing.

    Raises InvalidSetting where the renderer does not fit the tokenizer, or where others could reach the gateway without
    a key.
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
        # The address it listens at, and the one that agents use.
        self.local_url = self.url = ""
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Raises PortInUse."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions/{session}/v1/completions", self._complete)
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
        shown = f"[{host}]" if ":" in host else host
        self.local_url = f"http://{shown}:{listener.getsockname()[1]}"
        self.url = (self.settings.gateway_url or self.local_url).rstrip("/")
        log.info("agents reach the engines at %s", self.url)
        if self.settings.region is not None and is_loopback(urlsplit(self.url).hostname or ""):
            log.warning("agents on AWS cannot reach %s: give gateway_host, or gateway_url of a tunnel to it", self.url)

    async def stop(self) -> None:
        for session_id in list(self._sessions):
            await self.close_session(session_id)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._workers.close()

    def open_session(self, session: Session) -> str:
        """Returns the base URL for OpenAI's clients."""
        self._sessions[session.id] = session
        return f"{self.url}/sessions/{session.id}/v1"

    async def close_session(self, session_id: str) -> None:
        """Ends its requests, also at the engines. Harmless when it is closed already."""
        session = self._sessions.pop(session_id, None)
        if session is None or not session.running:
            return
        # Engines are told before the tasks end: afterwards nobody knows where their requests are.
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
                return _refusal(too_deep())
            except SlimeError as error:
                log.info("%s: %s", request.path, error)
                return _refusal(error)

        return guard

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": self.settings.model_id, "object": "model", "created": 0, "owned_by": "slime"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._chat_turn)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self._text_turn)

    async def _answer(self, request: web.Request, make: Any) -> web.StreamResponse:
        """Every request of a session runs in a task that closing the session ends."""
        session = self._session(request)
        body = openai_format.check_request(await self._bodies.json(request))
        task = asyncio.ensure_future(make(session, body))
        session.running.add(task)
        task.add_done_callback(session.running.discard)
        try:
            answer = await task
        except asyncio.CancelledError:
            task.cancel()
            if session.id in self._sessions:
                raise
            raise _closed(session.id) from None
        if not body.get("stream"):
            return web.json_response(answer)
        return await self._stream(request, body, answer)

    async def _stream(self, request: web.Request, body: JSON, answer: JSON) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in openai_format.events(answer, with_usage=include_usage(body)):
            await response.write(event)
        await response.write_eof()
        return response

    async def _chat_turn(self, session: Session, body: JSON) -> JSON:
        messages = clean(body.get("messages"))
        extra = check_arguments(self.state.tokenizer, body.get("chat_template_kwargs"))
        turns = list(session.turns)
        prompt = await self._workers.run(
            "messages", lambda: self.renderer.prompt(messages, body.get("tools"), turns, extra)
        )
        turn = await self._generate(session, body, prompt)
        message = parse_answer(
            self._content(turn),
            tools=bool(self.settings.sglang_tool_call_parser and body.get("tools")),
            reasoning=bool(self.settings.sglang_reasoning_parser),
        )
        turn.messages = [*messages, *clean([message])]
        session.turns.append(turn)
        log_probs = openai_format.log_prob_content(self.state.tokenizer, turn) if body.get("logprobs") else None
        return openai_format.chat_answer(self._model(body), turn, message, log_probs)

    async def _text_turn(self, session: Session, body: JSON) -> JSON:
        prompt = body.get("prompt")
        ids = prompt
        if isinstance(prompt, str):
            text, tokenizer = prompt, self.state.tokenizer
            ids = await self._workers.run("prompt", lambda: encode(tokenizer, text, "prompt"))
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise InvalidField("prompt", prompt, "a text or a list of token ids, not empty")
        turn = await self._generate(session, body, ids)
        session.turns.append(turn)
        wanted = openai_format.wants_log_probs(body)
        log_probs = openai_format.text_log_probs(self.state.tokenizer, turn) if wanted else None
        return openai_format.text_answer(self._model(body), turn, self._content(turn), log_probs)

    async def _generate(self, session: Session, body: JSON, prompt: list[int]) -> Turn:
        params = dict(session.sampling_params)
        limit = int(params["max_new_tokens"])
        context = self.state.context_len
        if context is not None:
            if len(prompt) >= context:
                raise InvalidField("messages", f"{len(prompt)} tokens", f"less than {context} tokens (the context)")
            limit = min(limit, context - len(prompt))
        params["max_new_tokens"] = openai_format.budget(body, limit)
        stops = [*(params.get("stop") or []), *openai_format.stops(body)]
        if stops:
            params["stop"] = stops
        if session.sample_index is not None:
            params["sampling_seed"] = sampling_seed(
                self.state.args.rollout_seed, session.sample_index, repeat=session.requests
            )
        session.requests += 1
        rid = uuid.uuid4().hex
        session.open_requests.add(rid)
        started = time.monotonic()
        try:
            (output,) = await self.state.fleet.generate([prompt], [params], rids=[rid], session_id=session.id)
        finally:
            session.open_requests.discard(rid)
            session.generation_seconds += time.monotonic() - started
        turn = self._turn(prompt, output)
        if turn.finish_reason == "abort":
            raise Unavailable("the engine ended the request before its answer was whole", field="finish_reason")
        if session.id not in self._sessions:
            raise _closed(session.id)
        return turn

    def _turn(self, prompt: list[int], output: Mapping[str, Any]) -> Turn:
        meta = output.get("meta_info") or {}
        pairs = meta.get("output_token_logprobs")
        if pairs is None:
            raise EngineError("an engine answered without output_token_logprobs", field="output_token_logprobs")
        ids = [int(pair[1]) for pair in pairs]
        text = output.get("text")
        if text is None:
            text = self.state.tokenizer.decode(ids, skip_special_tokens=False)
        kept = {key: value for key, value in meta.items() if key != "output_token_logprobs"}
        return Turn(list(prompt), ids, [float(pair[0]) for pair in pairs], kept, str(text))

    def _content(self, turn: Turn) -> str:
        """Returns the text of a turn, without the tokens that end it and without a stop string that matched."""
        text = str(self.state.tokenizer.decode(turn.completion_ids, skip_special_tokens=True))
        reason = turn.meta.get("finish_reason")
        matched = reason.get("matched") if isinstance(reason, Mapping) else None
        return text[: text.rfind(matched)] if isinstance(matched, str) and matched in text else text

    def _model(self, body: Mapping[str, Any]) -> str:
        return str(body.get("model") or self.settings.model_id)

    def _session(self, request: web.Request) -> Session:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise NotFound("no such session, or it is closed", field="session", expected="a session that is open")
        return session


def _closed(session_id: str) -> WrongState:
    return WrongState(f"session {session_id} was closed", field="session", expected="a session that is open")


def _refusal(error: SlimeError) -> web.Response:
    status = getattr(error, "http_status", None) or HTTP_STATUS.get(error.status, 500)
    response = web.json_response(openai_format.error_body(error, status), status=status)
    if status in (408, 413):
        # The rest of the body is not waited for.
        response.force_close()
    return response
