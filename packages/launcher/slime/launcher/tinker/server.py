"""HTTP server of the service: the routes that the SDK calls, the checks before them, and errors in the SDK's form."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.launcher.tinker.messages import CONTENT_TYPE
from slime.launcher.tinker.service import Service
from slime.rollout.doors import Access, Bodies, Connections
from slime.rollout.doors.bodies import too_deep
from slime.types.errors import InvalidField, SlimeError

log = logging.getLogger(__name__)

API = "/api/v1"
PASSES = f"{API}/forward_backward"
# Largest bodies by route, in bytes; the SDK sends data in pieces of 5 MB.
PASS_BYTES = 64 << 20
SAMPLE_BYTES = 16 << 20
BYTES = 1 << 20
# Seconds that a client waits for a result before it is told to ask again; it hangs up after 45.
POLL_SECONDS = 25.0
# HTTP status of a SlimeError by its gRPC status. The SDK retries 408, 409, 429 and 5xx for five minutes.
HTTP_STATUS = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "UNIMPLEMENTED": 400, "UNAUTHENTICATED": 401, "NOT_FOUND": 404,
    "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
# Options of the SDK: plain keys, passes one at a time and uncompressed, a poll for each result.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False, "sample_use_retrieve_futures": False, "custom_loss_server_side": False,
    # A CPU may work on one request for minutes.
    "sample_enable_stuck_detection": False,
}  # fmt: skip
DYNAMIC_CONFIG = {"refresh_interval_sec": 3600, "sample_cancel_enabled": True}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TinkerServer:
    """Serves `service` over HTTP. api_key: the key that every request except the health check must carry."""

    def __init__(self, service: Service, host: str, api_key: str) -> None:
        self.service = service
        self.connections = Connections()
        self._access = Access(
            host, api_key=api_key, open_paths=(f"{API}/healthz",), content_types={PASSES: CONTENT_TYPE}
        )
        self._bodies = {size: Bodies(max_bytes=size) for size in (PASS_BYTES, SAMPLE_BYTES, BYTES)}

    def application(self) -> web.Application:
        application = web.Application(middlewares=[_errors_as_json, self._access.middleware])
        application.on_shutdown.append(self._stop)
        s = self.service
        posts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "client/config": lambda body: CLIENT_CONFIG,
            "client/dynamic_config": lambda body: DYNAMIC_CONFIG,
            "create_session": s.create_session,
            "session_heartbeat": s.heartbeat,
            "create_model": s.create_model,
            "load_weights": s.load_weights,
            "optim_step": s.optim_step,
            "save_weights": s.save_weights,
            "save_weights_for_sampler": s.save_weights_for_sampler,
            "get_info": s.get_info,
            "weights_info": s.weights_info,
            "create_sampling_session": s.create_sampling_session,
            # Accepted and dropped; it is sent nowhere.
            "telemetry": lambda body: {"status": "accepted"},
        }
        routes: list[tuple[str, str, Handler]] = [
            *(("POST", f"{API}/{path}", self._json(answer)) for path, answer in posts.items()),
            ("POST", f"{API}/asample", self._json(s.sample, SAMPLE_BYTES)),
            ("POST", PASSES, self._pass),
            ("POST", f"{API}/retrieve_future", self._retrieve),
            ("POST", f"{API}/cancel_future", self._cancel),
            ("POST", f"{API}/sessions/{{session}}/finish", self._finish),
            ("GET", f"{API}/healthz", self._health),
            ("GET", f"{API}/get_server_capabilities", self._get(lambda request: s.capabilities())),
            ("GET", f"{API}/samplers/{{id}}", self._get(lambda request: s.sampler(request.match_info["id"]))),
            ("GET", f"{API}/training_runs/{{id}}", self._get(lambda request: s.training_run(request.match_info["id"]))),
            ("GET", f"{API}/training_runs/{{id}}/checkpoints", self._get(self._checkpoints)),
            ("DELETE", f"{API}/training_runs/{{id}}/checkpoints/{{kind}}/{{name}}", self._remove),
        ]
        for method, path, handler in routes:
            application.router.add_route(method, path, handler)
        return application

    async def _stop(self, application: web.Application) -> None:
        await self.service.close()

    def _json(self, answer: Callable[[dict[str, Any]], dict[str, Any]], most: int = BYTES) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return web.json_response(answer(await self._object(request, most)))

        return handle

    @staticmethod
    def _get(answer: Callable[[web.Request], dict[str, Any]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return web.json_response(answer(request))

        return handle

    async def _object(self, request: web.Request, most: int = BYTES) -> dict[str, Any]:
        body = await self._bodies[most].json(request)
        if not isinstance(body, dict):
            raise InvalidField("body", type(body).__name__, "a JSON object")
        return body

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.service.forward_backward(await self._bodies[PASS_BYTES].read(request)))

    async def _retrieve(self, request: web.Request) -> web.StreamResponse:
        """Waits for a result. Status 408: it is not there yet, ask again; 410: the request is unknown or forgotten."""
        request_id = str((await self._object(request)).get("request_id"))
        try:
            result = await self.service.futures.get(request_id, POLL_SECONDS)
        except KeyError:
            return web.json_response({"error": f"there is no request {request_id}"}, status=410)
        if result is None:
            again = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(again, status=408)
        if isinstance(result, bytes):
            return web.Response(body=result, content_type=CONTENT_TYPE)
        return web.json_response(result)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        self.service.futures.cancel(str((await self._object(request)).get("request_id")))
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        await self._object(request)
        self.service.finish_session(request.match_info["session"])
        return web.json_response({})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    def _checkpoints(self, request: web.Request) -> dict[str, Any]:
        return {"checkpoints": list(self.service.served.store.checkpoints(request.match_info["id"]))}

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        found = request.match_info
        self.service.served.store.remove(f"tinker://{found['id']}/{found['kind']}/{found['name']}")
        return web.json_response({})


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except RecursionError:
        return _refusal(too_deep())
    except SlimeError as error:
        return _refusal(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return web.json_response({"error": f"{request.method} {request.path}: {error.reason}"}, status=error.status)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)


def _refusal(error: SlimeError) -> web.Response:
    status = getattr(error, "http_status", None) or HTTP_STATUS.get(error.status, 500)
    response = web.json_response({"error": str(error)}, status=status)
    if status in (408, 413):
        # Do not wait for the rest of the body.
        response.force_close()
    return response
