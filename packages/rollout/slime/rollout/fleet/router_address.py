"""The router as one HTTP address, for plug-ins that send requests to `args.sglang_router_ip` themselves.

    POST /generate, /v1/...         go to the engine that the router chooses, as bytes; with X-SMG-Routing-Key, to the
                                    engine that has the session's cache
    POST /abort_request             {"rid": ID or IDs} or {"abort_all": true}
    GET  /workers, /list_workers    the engines, in the two forms of SGLang's router
    GET  /health, /v1/models, ...   answered by an engine

So such requests count as samples in flight, wait for weight updates, and go to another engine where theirs is lost
before it has answered. What changes an engine is not let through.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from slime.rollout.chat.front import status_of
from slime.rollout.doors import Access, Bodies, Connections, listen
from slime.rollout.doors.bodies import parse_json, too_deep
from slime.rollout.engines.keys import new_key, remember
from slime.rollout.engines.pairs import with_prompt_log_probs
from slime.rollout.engines.process import ANY_ADDRESS
from slime.rollout.engines.streams import never_sent
from slime.rollout.fleet.fleet import Fleet, PairInFlight, RoutedRequest
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.router import Withdrawn
from slime.types.addresses import join_address
from slime.types.errors import EngineError, InvalidField, InvalidSetting, NotFound, SlimeError

log = logging.getLogger(__name__)

ASKED = (
    "/health", "/health_generate", "/get_model_info", "/model_info", "/get_server_info", "/server_info", "/v1/models",
)  # fmt: skip
SESSION = "X-SMG-Routing-Key"


class RouterAddress:
    """Listens on a free port of `host`, with a key that `engine_headers(url)` returns. Used on the loop of `fleet`."""

    def __init__(self, fleet: Fleet, host: str) -> None:
        self._fleet, self._host = fleet, host
        self._key = new_key()
        self._bodies = Bodies()
        self._access = Access(host, api_key=self._key)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Raises InvalidSetting where it cannot listen."""
        application = web.Application(middlewares=[self._guard])
        add = application.router
        add.add_post("/generate", self._forward)
        add.add_post("/v1/{path:.+}", self._forward)
        add.add_post("/abort_request", self._abort)
        add.add_get("/workers", self._workers)
        add.add_get("/list_workers", self._urls)
        for path in ASKED:
            add.add_get(path, self._ask)
        connections = Connections()
        self._runner = connections.runner(application)
        await self._runner.setup()
        try:
            listener = listen(self._host, 0)
        except OSError as error:
            await self._runner.cleanup()
            raise InvalidSetting(
                f"the router cannot listen on --rollout-engine-host {self._host}: {error}",
                field="--rollout-engine-host", value=self._host, expected="an address of the rollout service's node",
            ) from error  # fmt: skip
        await connections.serve(self._runner, listener)
        host = ANY_ADDRESS.get(self._host, self._host)
        self.url = f"http://{join_address(host, listener.getsockname()[1])}"
        remember(self.url, self._key)
        self._fleet.address = self

    async def stop(self) -> None:
        if self._runner is not None:
            remember(self.url, None)
            await self._runner.cleanup()
            self._runner = None

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
                return _refusal(error)
            except web.HTTPException as error:
                if error.status not in (404, 405):
                    raise
                return _refusal(NotFound(f"the router serves no {request.method} {request.path}", field="path"))

        return guard

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        raw = await self._bodies.read(request)
        body = parse_json(raw) if raw else {}
        body = body if isinstance(body, dict) else {}
        if self._fleet.router.in_pairs and body.get("rid") is None:
            # The other engine of a pair is told by this id when one of them fails.
            body = body | {"rid": _new_ids(body)}
        routed = RoutedRequest(samples=_samples(body), rids=_request_ids(body), session_id=request.headers.get(SESSION))
        answer = _Answer(request, raw, self._fleet.options.request_timeout)
        response = None
        try:
            while response is None:
                async with self._fleet.admit(routed) as chosen:
                    response = await self._fleet.attempt(routed, chosen, partial(answer.take_or_cut_off, chosen, body))
            return response
        except Withdrawn:
            outputs = [never_sent(rid) for rid in routed.rids or [""]]
            return web.json_response(outputs if isinstance(body.get("rid"), list) else outputs[0])

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self._bodies.json(request)
        body = body if isinstance(body, dict) else {}
        rids = [rid for rid in _request_ids(body) if rid]
        if not rids and body.get("abort_all") is not True:
            # An abort that names no request must not end those of the whole run.
            raise InvalidField("rid", body.get("rid"), "the id of a request, or abort_all: true in its place")
        await self._fleet.abort(rids or None)
        return web.Response()

    async def _workers(self, request: web.Request) -> web.Response:
        workers = [{"id": m.name, "url": m.url, "is_healthy": m.healthy} for m in self._fleet.members]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def _urls(self, request: web.Request) -> web.Response:
        return web.json_response({"urls": [member.url for member in self._fleet.members]})

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        members = self._fleet.router.in_rotation
        if not members:
            raise EngineError("no engine is in rotation", field="engines", expected="one that serves")
        return await _Answer(request, b"", members[0].client.timeout_seconds).take(members[0])


class _Answer:
    """The answer of an engine, handed on as it arrives. begun: whether the client has got a part of it."""

    def __init__(self, request: web.Request, body: bytes, timeout_seconds: float) -> None:
        self._request, self._body, self._timeout = request, body, timeout_seconds
        self._response: web.StreamResponse | None = None

    @property
    def begun(self) -> bool:
        return self._response is not None

    async def take_or_cut_off(
        self, member: Member, body: Mapping[str, Any], pair: PairInFlight | None
    ) -> web.StreamResponse:
        """Does what `take` does, or `take_from_pair`; but cuts an answer off of which the client has got a part."""
        try:
            if pair is not None:
                return await self.take_from_pair(member, pair, body)
            return await member.until_left(self.take(member))
        except EngineError as error:
            if not self.begun:
                raise
            log.warning("a streamed answer is cut off: %s", error)
            return self.cut_off()

    async def take(self, member: Member, body: bytes | None = None) -> web.StreamResponse:
        """Raises EngineError where the engine fails (5xx) or is gone, DeadlineExceeded; refusals are handed on.

        body: in place of that of the request, for one attempt only.
        """
        repeatable = body is None
        body = self._body if body is None else body
        headers = {"Content-Type": "application/json"} if body else {}
        if session := self._request.headers.get(SESSION):
            headers[SESSION] = session
        return await member.client.relay(
            self._request.method, self._request.path_qs, self._hand_on, lambda: repeatable and not self.begun,
            timeout_seconds=self._timeout, data=body, headers=headers,
        )  # fmt: skip

    async def take_from_pair(self, member: Member, pair: PairInFlight, body: Mapping[str, Any]) -> web.StreamResponse:
        """Does what `take` does, with another engine that does prefill for `member`. Raises InvalidField for what that
        one refuses. A streamed answer lacks the log-probs of the prompt, which only the other engine has."""
        fields = {**body, **pair.fields}

        async def decode() -> web.StreamResponse:
            response = await member.until_left(self.take(member, json.dumps(fields).encode()))
            if response.status >= 400:
                raise _Refused(response)
            return response

        prefill = pair.prefill.post(self._request.path_qs, fields | {"stream": False}, timeout_seconds=self._timeout)
        try:
            first, response = await pair.answers(pair.until_prefilled(prefill), decode())
        except _Refused as refused:
            return refused.response
        if isinstance(response, web.Response) and response.status == 200 and self._request.path == "/generate":
            whole = with_prompt_log_probs(parse_json(response.body), first)  # type: ignore[arg-type]
            return web.json_response(whole)
        return response

    async def _hand_on(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
        if answer.content_type != "text/event-stream":
            # Read whole, so that a request whose engine dies in between can go to another one.
            return web.Response(status=answer.status, body=await answer.read(), headers=kind)
        response = web.StreamResponse(status=answer.status, headers=kind)
        async for part in answer.content.iter_any():
            try:
                if self._response is None:
                    self._response = response
                    await response.prepare(self._request)
                await response.write(part)
            except ConnectionResetError:
                # The client's connection, not the engine's.
                return response
        return response

    def cut_off(self) -> web.StreamResponse:
        """Closes the connection in the middle of the answer, so that the client does not take it for whole."""
        assert self._response is not None
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._response


class _Refused(Exception):
    """A refusal of the engine that decodes, which ends the call of the other one."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__(response.status)
        self.response = response


def _new_ids(body: Mapping[str, Any]) -> str | list[str]:
    """Returns an id for the prompt of a request, or for each of its prompts."""
    prompts = _prompts(body)
    return uuid.uuid4().hex if prompts is None else [uuid.uuid4().hex for _ in prompts]


def _request_ids(body: Mapping[str, Any]) -> Sequence[str]:
    rids = body.get("rid")
    rids = rids if isinstance(rids, list) else [rids]
    return [rid for rid in rids if isinstance(rid, str)]


def _samples(body: Mapping[str, Any]) -> int:
    """Returns how many sequences a request asks for; 1 where it says nothing that an engine would accept."""
    prompts = _prompts(body)
    params = body.get("sampling_params", body)
    each = params.get("n") if isinstance(params, dict) else 1
    return (1 if prompts is None else len(prompts)) * (each if type(each) is int and each > 0 else 1)


def _prompts(body: Mapping[str, Any]) -> list[Any] | None:
    """Returns the prompts of a request for several, else None."""
    prompts = body.get("input_ids", body.get("text"))
    return prompts if isinstance(prompts, list) and prompts and isinstance(prompts[0], (list, str)) else None


def _refusal(error: SlimeError) -> web.Response:
    status = status_of(error)
    response = web.json_response(
        {"error": {"message": error.message, "field": error.field, "expected": error.expected}}, status=status
    )
    if status in (408, 413):
        response.force_close()
    return response
