"""The HTTP endpoints of the embedded engine, under SGLang's names."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from aiohttp import web

from slime.rollout.chat.front import Front, refusal
from slime.rollout.doors import Access, Bodies, Connections
from slime.rollout.doors.access import BYTES
from slime.rollout.doors.bodies import too_deep
from slime.rollout.engines.embedded.endpoints.chat import ServedChat
from slime.rollout.engines.embedded.endpoints.generate import StreamPart, answer, make_response, parse_generate
from slime.rollout.engines.embedded.endpoints.scoring import MOST_SCORED, Scored, asks_for_scores, parse_scored, score
from slime.rollout.engines.embedded.endpoints.served_model import ServedModel, error_detail, http_status, send_events
from slime.rollout.engines.embedded.model.checks import WeightChecker
from slime.rollout.engines.embedded.model.loading import Loaded, free_cached_memory
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.response import Response
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.scheduling.scheduler import Scheduler
from slime.types.errors import EngineError, InvalidField, NotFound, SlimeError, Unavailable

log = logging.getLogger(__name__)

# Limits of a bucket of weights, in bytes and seconds; all other bodies are smaller.
LARGEST_BUCKET = 4 << 30
BUCKET_SECONDS = 600.0
BUCKETS = "/update_weights_from_tensor"
PAUSE_MODES = ("abort", "in_place", "retract")


class EngineServer(ServedModel):
    """All endpoints of one model. api_key: the key that calls must carry; None where no key is required."""

    def __init__(
        self, loaded: Loaded, scheduler: Scheduler, options: EmbeddedOptions, api_key: str | None = None
    ) -> None:
        super().__init__(loaded, scheduler, options)
        self.checker = WeightChecker(scheduler.weights)
        self.paused = False
        self.started = time.time()
        self.connections = Connections()
        self._access = Access(options.host, api_key=api_key, names=options.allowed_host, content_types={BUCKETS: BYTES})
        self._bodies = Bodies()
        self._buckets = Bodies(max_bytes=LARGEST_BUCKET, seconds=BUCKET_SECONDS, together=LARGEST_BUCKET)
        self._scoring = 0
        self._one_bucket = asyncio.Lock()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[_errors_as_json, self._access.middleware])
        application.on_shutdown.append(self._stop)
        routes: list[tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = [
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model}", self.model),
            ("GET", "/health", self.health),
            ("GET", "/health_generate", self.health_generate),
            ("GET", "/get_weight_version", self.weight_version),
            ("GET", "/get_model_info", self.model_info),
            ("GET", "/model_info", self.model_info),
            ("GET", "/server_info", self.server_info),
            ("GET", "/get_server_info", self.server_info),
            ("GET", "/v1/loads", self.loads),
            # Calls with an effect are POST, even where SGLang accepts GET, which any web page can make a browser send.
            ("POST", "/generate", self.generate),
            ("POST", "/flush_cache", self.flush_cache),
            ("POST", "/abort_request", self.abort_request),
            ("POST", "/pause_generation", self.pause_generation),
            ("POST", "/continue_generation", self.continue_generation),
            ("POST", "/update_weights_from_disk", self.update_weights_from_disk),
            ("POST", BUCKETS, self.update_weights_from_tensor),
            ("POST", "/weights_checker", self.check_weights),
            ("POST", "/release_memory_occupation", self.release_memory),
            ("POST", "/resume_memory_occupation", self.resume_memory),
        ]
        for method, path, handler in routes:
            application.router.add_route(method, path, handler)
        Front(self.read_json, lambda _: ServedChat(self)).add_routes(application)
        return application

    async def _stop(self, application: web.Application) -> None:
        # This runs before the handlers are cancelled, so that waiting clients get an error, not a closed connection.
        await asyncio.to_thread(self.scheduler.stop)
        self.workers.close()

    async def read_json(self, request: web.Request) -> dict[str, Any]:
        """Returns the JSON object in the body, an empty one for an empty body. Raises InvalidField otherwise."""
        body = await self._bodies.json(request)
        if body is None:
            return {}
        if not isinstance(body, dict):
            raise InvalidField("body", type(body).__name__, "a JSON object")
        return body

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.read_json(request)
        if asks_for_scores(body):
            scored = parse_scored(body, self.loaded)
            return web.json_response(await self._score(scored))
        if body.get("image_data") or body.get("text") is not None:
            responses, batched = await self.workers.run("the prompt", lambda: parse_generate(body, self.loaded))
        else:
            # On the event loop, so that requests of token ids are served in the order of their arrival.
            responses, batched = parse_generate(body, self.loaded)
        wanted: dict[str, Any] = {
            "log_probs": bool(body.get("return_logprob")),
            "experts": bool(body.get("return_routed_experts")),
        }
        if body.get("stream"):
            incremental = bool(body.get("incremental"))
            return await send_events(request, self._events(responses, batched, incremental, wanted))
        await self.finish(responses)
        answers = [answer(self.loaded, r, **wanted) for r in responses]
        return web.json_response(answers if batched else answers[0])

    async def _score(self, scored: Scored) -> Any:
        if self._scoring >= MOST_SCORED:
            raise Unavailable(f"{MOST_SCORED} prompts wait for their log-probs already", field="input_ids")
        self._scoring += 1
        work = self.scheduler.in_pieces(lambda: score(self.loaded, scored, self.scheduler.weights))
        try:
            return await asyncio.wrap_future(work.done)
        finally:
            self._scoring -= 1
            work.is_wanted = False

    async def _events(
        self, responses: list[Response], batched: bool, incremental: bool, wanted: dict[str, Any]
    ) -> AsyncGenerator[list[Any], None]:
        """Yields the answers so far, or with `incremental` only what is new of each. Those to a list of prompts have
        the index of their prompt."""
        sent = [0] * len(responses)
        async with contextlib.aclosing(self.progress(responses)) as steps:
            async for step in steps:
                events = []
                for each in step:
                    tokens = slice(sent[each.index] if incremental else 0, each.tokens)
                    part = StreamPart(tokens, each.finished, incremental)
                    event = answer(self.loaded, responses[each.index], part=part, **wanted)
                    events.append(event | {"index": each.index} if batched else event)
                    sent[each.index] = each.tokens
                yield events

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name, "object": "model", "created": int(self.started), "owned_by": "slime",
            "root": self.options.model_path, "max_model_len": self.loaded.context_length,
        }  # fmt: skip

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: web.Request) -> web.Response:
        if request.match_info["model"] != self.name:
            raise NotFound(f"no model {request.match_info['model']}", field="model", expected=self.name)
        return web.json_response(self._model())

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        """Generates a token, unless the engine is paused or is generating already."""
        if not self.paused and not self.scheduler.num_running:
            params = SamplingParams(max_new_tokens=1, temperature=0.0)
            await self.finish([make_response(self.loaded, [0], params, f"health-{time.monotonic_ns()}", "input_ids")])
        return web.Response()

    async def flush_cache(self, request: web.Request) -> web.Response:
        # There is nothing to flush: no cache outlives its batch.
        return web.Response(text="Cache flushed.\n")

    async def weight_version(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.scheduler.weights.version})

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.options.model_path,
                "tokenizer_path": self.options.model_path,
                "is_generation": True,
                "weight_version": self.scheduler.weights.version,
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "engine": "embedded",
                "model_path": self.options.model_path,
                "served_model_name": self.name,
                "context_length": self.loaded.context_length,
                "max_running_requests": self.options.max_running_requests,
                "deterministic": self.options.deterministic,
                "enable_return_routed_experts": self.loaded.routing is not None,
                "increments": True,
                "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
                "device": str(self.loaded.model.device),
                "weight_version": self.scheduler.weights.version,
                "num_running": self.scheduler.num_running,
                "num_waiting": self.scheduler.num_waiting,
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        """Returns the figures by which a fleet tunes the number of samples in flight."""
        used, most = self.scheduler.used_tokens, self.scheduler.max_tokens
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.scheduler.num_running,
            "num_waiting_reqs": self.scheduler.num_waiting,
            "num_used_tokens": used,
            "max_total_num_tokens": most,
            "max_running_requests": self.options.max_running_requests,
            "token_usage": round(used / most, 4),
        }
        return web.json_response({"loads": [load]})

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await self.read_json(request)
        rid = body.get("rid")
        if not rid and not body.get("abort_all"):
            raise InvalidField("rid", rid, "the id of a request, or abort_all: true")
        await asyncio.wrap_future(self.scheduler.abort(None if body.get("abort_all") else rid))
        return web.json_response({"success": True})

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await self.read_json(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise InvalidField("mode", mode, f"one of {', '.join(PAUSE_MODES)}")
        self.paused = True
        await asyncio.wrap_future(self.scheduler.pause(mode))
        return web.json_response({"status": "ok", "message": "generation is paused"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.scheduler.resume())
        self.paused = False
        return web.json_response({"status": "ok", "message": "generation continues"})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await self.read_json(request)
        path = body.get("model_path")
        if not isinstance(path, str) or not os.path.isdir(path):
            raise InvalidField("model_path", path, "a Hugging Face directory on the engine's machine")
        weights = self.scheduler.weights
        version = str(body.get("weight_version") or weights.version)
        await asyncio.wrap_future(self.scheduler.between_steps(lambda: weights.load_directory(path, version)))
        return web.json_response({"success": True, "message": f"loaded {path}", "weight_version": version})

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        """Loads new weights. Body: one bucket of safetensors, or of deltas with delta=true. Query: weight_version,
        delta, and last=true with the last bucket; file for a bucket in a file of this machine, with an empty body."""
        version, last = request.query.get("weight_version"), request.query.get("last", "true")
        delta, file = request.query.get("delta", "false"), request.query.get("file")
        if not version:
            raise InvalidField("weight_version", version, "the version of these weights, in the query")
        for name, value in (("last", last), ("delta", delta)):
            if value not in ("true", "false"):
                raise InvalidField(name, value, "true or false")
        weights = self.scheduler.weights
        if file is not None and delta == "true":
            raise InvalidField("delta", delta, "false with a file")
        load = weights.load_delta if delta == "true" else weights.load_bucket
        is_last = last == "true"
        async with self._one_bucket:
            bucket = await self._buckets.read(request)
            work = lambda: load(bucket, version, last=is_last)  # noqa: E731
            if file is not None:
                work = lambda: weights.load_file(file, version, last=is_last)  # noqa: E731
            await asyncio.wrap_future(self.scheduler.between_steps(work))
        # A caller learns from `file` that this engine knows files, which no engine has to.
        return web.json_response({"success": True, "weight_version": weights.version, "file": file})

    async def check_weights(self, request: web.Request) -> web.Response:
        action = (await self.read_json(request)).get("action", "checksum")
        return web.json_response(
            await asyncio.wrap_future(self.scheduler.between_steps(lambda: self.checker.run(action)))
        )

    async def release_memory(self, request: web.Request) -> web.Response:
        """Releases the memory that CUDA caches for the next batch; the weights stay."""
        await asyncio.wrap_future(self.scheduler.between_steps(free_cached_memory))
        return web.json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        return web.json_response(None)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        return await handler(request)
    except RecursionError:
        return _refusal(request.path, too_deep())
    except SlimeError as error:
        return _refusal(request.path, error)
    except web.HTTPException:
        raise
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return _refusal(request.path, EngineError(f"{type(error).__name__}: {error}"))


def _refusal(path: str, error: SlimeError) -> web.Response:
    of_protocol = refusal(path, error)
    if of_protocol is not None:
        return of_protocol
    status = http_status(error)
    response = web.json_response({"error": error_detail(error)}, status=status)
    if status in (408, 413):
        # Closes the connection instead of waiting for the rest of the body.
        response.force_close()
    return response
